// Sums over the GPUs of a host, in the order of the ranks, by stores to the memory of the others.
//
// Each rank has memory that the others write (`bases`, an address for each rank), and reads nothing but its own. All
// ranks launch the same calls in the same order. A call has a number, the same on every rank, which counts from 1:
// `calls[parity]`; the kernel writes the next one to `calls[1 - parity]`, and the host alternates the parity. Two calls
// in turn use two slots. That is enough: a rank ends a call once it has heard from all others, which therefore have
// ended the call before, and have read what the slot held.
//
// A kernel that waits for a peer gives up after `patience` nanoseconds: it writes 1 + the peer's rank to `failure`, in
// memory of the host, and sets calls[2], after which no later call waits. No kernel hangs.
#include "collective/waiting.cuh"
#include "common/common.cuh"
#include "common/rotation.cuh"

using namespace bminf;

namespace {

// The memory of a rank that others write: for small sums [2 slots][ranks][small] values with call numbers; then for
// large ones [2][ranks][share] and [2][large] vectors of four values; then flags [2 phases][ranks][MAX_BLOCKS]; and in
// a place of their own the lines of all_reduce_lines.
struct Layout {
    long long small, share, large;  // values, vectors of four, vectors of four
    int ranks;

    __device__ uint4* values(unsigned long long base, int slot, int source) const {
        return reinterpret_cast<uint4*>(base) + (static_cast<long long>(slot) * ranks + source) * (small / 2);
    }
    __device__ float4* parts(unsigned long long base, int slot, int source) const {
        float4* first = reinterpret_cast<float4*>(base) + ranks * small;
        return first + (static_cast<long long>(slot) * ranks + source) * share;
    }
    __device__ float4* sums(unsigned long long base, int slot) const {
        return parts(base, 2, 0) + static_cast<long long>(slot) * large;
    }
    __device__ unsigned* flag(unsigned long long base, int phase, int source, int block) const {
        unsigned* first = reinterpret_cast<unsigned*>(sums(base, 2));
        return first + (phase * ranks + source) * MAX_BLOCKS + block;
    }
};

__device__ __forceinline__ void push(uint4* to, uint4 x) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ uint4 pushed(const uint4* from) {
    uint4 x;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// The number of this call. The next one is written for the next call, which waits for this kernel.
__device__ __forceinline__ unsigned begin_call(unsigned* calls, int parity) {
    const unsigned call = *static_cast<volatile unsigned*>(calls + parity);
    if (blockIdx.x == 0 && threadIdx.x == 0) calls[1 - parity] = call == 0xffffffffu ? 2 : call + 1;
    return call;
}

__device__ __forceinline__ float4 vector_at(const float* rows, long long pitch, long long width, long long i) {
    return *reinterpret_cast<const float4*>(rows + i / width * pitch + i % width * 4);
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ float4 rounded4(float4 a) {
    return make_float4(rounded(a.x), rounded(a.y), rounded(a.z), rounded(a.w));
}

// Stores the sum of a vector, or adds the sum rounded to fp16 to what is there.
template <bool ADD>
__device__ __forceinline__ void put(float* out, long long pitch, long long width, long long i, float4 sum) {
    float4* place = reinterpret_cast<float4*>(out + i / width * pitch + i % width * 4);
    *place = ADD ? add4(*place, rounded4(sum)) : sum;
}

}  // namespace

// Where values i * N to i * N + N - 1 of rows of `width` such groups lie.
template <int N>
__device__ __forceinline__ long long place_of(int i, int width, long long pitch) {
    const unsigned row = static_cast<unsigned>(i) / width;
    return row * pitch + (i - row * width) * N;
}

// out = sum over the ranks of partial, plus the bias; or with ADD, out += fp16(that). fp32 [rows, n] of pitches that
// are multiples of 4. Each value is pushed to every peer beside the call's number, in eight bytes that arrive together,
// and polled for. For few values. A thread has PAIRS pairs of values at a time, and neighbours have neighbouring ones.
template <bool ADD>
__global__ void __launch_bounds__(THREADS) all_reduce_values(
    const float* partial, long long pitch, const float* bias, float* out, long long out_pitch, int rows, int n,
    const unsigned long long* bases, unsigned* calls, int* failure, int rank, int ranks, int parity, long long small,
    long long share, long long large, unsigned long long patience) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Layout layout = {small, share, large, ranks};
    const unsigned call = begin_call(calls, parity);
    const int slot = call % 2, width = (n + 3) / 4 * 2, total = rows * width, stride = gridDim.x * THREADS;
    const int first = blockIdx.x * THREADS + threadIdx.x;
    for (int begin = first; begin < total; begin += PAIRS * stride) {
        float2 x[PAIRS];
#pragma unroll
        for (int k = 0; k < PAIRS; ++k)
            if (const int i = begin + k * stride; i < total)
                x[k] = *reinterpret_cast<const float2*>(partial + place_of<2>(i, width, pitch));
        for (int peer = 0; peer < ranks; ++peer) {
            if (peer == rank) continue;
            uint4* to = layout.values(bases[peer], slot, rank);
#pragma unroll
            for (int k = 0; k < PAIRS; ++k)
                if (const int i = begin + k * stride; i < total)
                    push(to + i, make_uint4(__float_as_uint(x[k].x), call, __float_as_uint(x[k].y), call));
        }
    }
    Patience waiting = {calls, failure, patience};
    for (int begin = first; begin < total; begin += PAIRS * stride) {
        float2 own[PAIRS], before[PAIRS], sum[PAIRS];
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
            const int i = begin + k * stride;
            if (i >= total) continue;
            own[k] = *reinterpret_cast<const float2*>(partial + place_of<2>(i, width, pitch));
            if (ADD) before[k] = *reinterpret_cast<const float2*>(out + place_of<2>(i, width, out_pitch));
        }
        for (int source = 0; source < ranks; ++source) {
            const uint4* from = layout.values(bases[rank], slot, source);
            uint4 x[PAIRS];
            bool pending = source != rank;
            while (pending) {
                pending = false;
#pragma unroll
                for (int k = 0; k < PAIRS; ++k)
                    x[k] =
                        begin + k * stride < total ? pushed(from + begin + k * stride) : make_uint4(0, call, 0, call);
#pragma unroll
                for (int k = 0; k < PAIRS; ++k) pending = pending || x[k].y != call || x[k].w != call;
                pending = pending && waiting.goes_on(source);
            }
#pragma unroll
            for (int k = 0; k < PAIRS; ++k) {
                const float2 y =
                    source == rank ? own[k] : make_float2(__uint_as_float(x[k].x), __uint_as_float(x[k].z));
                sum[k] = source == 0 ? y : make_float2(__fadd_rn(sum[k].x, y.x), __fadd_rn(sum[k].y, y.y));
            }
        }
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
            const int i = begin + k * stride;
            if (i >= total) continue;
            float2 y = sum[k];
            if (bias != nullptr) {
                const float2 b = *reinterpret_cast<const float2*>(bias + i % width * 2);
                y = make_float2(__fadd_rn(y.x, b.x), __fadd_rn(y.y, b.y));
            }
            if (ADD) y = make_float2(__fadd_rn(before[k].x, rounded(y.x)), __fadd_rn(before[k].y, rounded(y.y)));
            *reinterpret_cast<float2*>(out + place_of<2>(i, width, out_pitch)) = y;
        }
    }
}

constexpr int PARTS = 8, FLAG = PARTS - 1;  // threads of a line, and the one whose part has the flag

// Stores a part of each of AT_ONCE lines, `stride` apart from `begin` on, for all peers.
template <int AT_ONCE, class LineOf>
__device__ __forceinline__ void push_lines(
    const uint4 (&x)[AT_ONCE], int begin, int stride, int count, int rank, int ranks, const LineOf& line_of) {
    for (int peer = 0; peer < ranks; ++peer) {
        if (peer == rank) continue;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int line = begin + k * stride;
            __syncwarp();  // a line's threads store together
            if (line < count) push(line_of(peer, rank, line), x[k]);
        }
    }
}

// sum = the parts of these lines of all ranks, in their order; `own` are those of this rank.
template <int AT_ONCE, class LineOf>
__device__ __forceinline__ void sum_lines(
    const float4 (&own)[AT_ONCE], float4 (&sum)[AT_ONCE], int begin, int stride, int count, unsigned call, int rank,
    int ranks, Patience& waiting, const LineOf& line_of) {
    for (int source = 0; source < ranks; ++source) {
        uint4 x[AT_ONCE];
        bool pending = source != rank;
        while (pending) {
            pending = false;
            __syncwarp();  // a line's threads load together
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) x[k] = pushed(line_of(rank, source, min(begin + k * stride, count - 1)));
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) pending = pending || (threadIdx.x % PARTS == FLAG && x[k].w != call);
            pending = __any_sync(FULL, pending) && __all_sync(FULL, waiting.goes_on(source));
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const float4 y = source == rank ? own[k]
                                            : make_float4(
                                                  __uint_as_float(x[k].x), __uint_as_float(x[k].y),
                                                  __uint_as_float(x[k].z), __uint_as_float(x[k].w));
            sum[k] = source == 0 ? y : add4(sum[k], y);
        }
    }
}

// The same by lines of 128 bytes, for more values over NVLink: seven threads push four values each, and an eighth the
// call's number, by one instruction of their warp. NVLink does not divide a line that a warp stores so, nor does a
// warp's load see a part of one; NCCL's protocol LL128 rests on the same. A rank's memory has lines
// [2 slots][ranks][capacity] `lines` bytes behind its beginning. A thread has a part of AT_ONCE lines at a time.
template <bool ADD, int AT_ONCE>
__global__ void __launch_bounds__(THREADS) all_reduce_lines(
    const float* partial, long long pitch, const float* bias, float* out, long long out_pitch, int rows, int n,
    const unsigned long long* bases, unsigned* calls, int* failure, int rank, int ranks, int parity, long long lines,
    long long capacity, unsigned long long patience) {
    constexpr int IN_WARP = WARP / PARTS;
    launch_dependent_grids();
    const int part = threadIdx.x % PARTS, width = (n + 3) / 4, total = rows * width;
    const int count = (total + FLAG - 1) / FLAG, stride = gridDim.x * (THREADS / PARTS);
    const int first = blockIdx.x * (THREADS / PARTS) + threadIdx.x / PARTS, ahead = first % IN_WARP;
    wait_on_dependent_grids();
    const unsigned call = begin_call(calls, parity);
    const long long slot = static_cast<long long>(call % 2) * ranks * capacity;
    const auto line_of = [&](int reader, int source, int line) {
        return reinterpret_cast<uint4*>(bases[reader] + lines) + (slot + source * capacity + line) * PARTS + part;
    };
    const auto has_values = [&](int line) { return part < FLAG && line * FLAG + part < total; };
    for (int begin = first; begin - ahead < count; begin += AT_ONCE * stride) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int line = begin + k * stride;
            x[k] = make_uint4(call, call, call, call);
            if (has_values(line))
                x[k] = *reinterpret_cast<const uint4*>(partial + place_of<4>(line * FLAG + part, width, pitch));
        }
        push_lines(x, begin, stride, count, rank, ranks, line_of);
    }
    Patience waiting = {calls, failure, patience};
    for (int begin = first; begin - ahead < count; begin += AT_ONCE * stride) {
        float4 own[AT_ONCE], before[AT_ONCE], sum[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int line = begin + k * stride, i = line * FLAG + part;
            if (!has_values(line)) continue;
            own[k] = *reinterpret_cast<const float4*>(partial + place_of<4>(i, width, pitch));
            if (ADD) before[k] = *reinterpret_cast<const float4*>(out + place_of<4>(i, width, out_pitch));
        }
        sum_lines(own, sum, begin, stride, count, call, rank, ranks, waiting, line_of);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int line = begin + k * stride, i = line * FLAG + part;
            if (!has_values(line)) continue;
            float4 y = sum[k];
            if (bias != nullptr) y = add4(y, reinterpret_cast<const float4*>(bias)[i % width]);
            *reinterpret_cast<float4*>(out + place_of<4>(i, width, out_pitch)) = ADD ? add4(before[k], rounded4(y)) : y;
        }
    }
}

// residual += fp16(sum over the ranks of partial, plus the bias), by lines, and then the codes of the rows' norm: int8
// [rows, codes_pitch] and scales fp32 [rows]. fp32 [rows, k], k a multiple of 32, at most 8 NORM_THREADS VECTORS. Each
// row has lines of its own. rotation, rotation_scale: those of rotate_row, if ROTATED. A block has a row.
template <bool CENTER, int VECTORS, bool ROTATED>
__global__ void __launch_bounds__(NORM_THREADS) all_reduce_norm(
    const float* partial, long long pitch, const float* bias, float* residual, long long residual_pitch, int k,
    const unsigned long long* bases, unsigned* calls, int* failure, int rank, int ranks, int parity, long long lines,
    long long capacity, unsigned long long patience, const float* norm_weight, const float* norm_bias, float eps,
    int8* codes, float* scales, long long codes_pitch, int rotation, float rotation_scale) {
    constexpr int AT_ONCE = 5, STRIDE = NORM_THREADS / PARTS;
    __shared__ RowScratch<NORM_THREADS, VECTORS> scratch;
    __shared__ float4 sums[2 * NORM_THREADS * VECTORS];
    launch_dependent_grids();
    const int row = blockIdx.x, part = threadIdx.x % PARTS, total = k / 4, count = (total + FLAG - 1) / FLAG;
    const int first = threadIdx.x / PARTS, ahead = first % (WARP / PARTS);
    partial += row * pitch, residual += row * residual_pitch;
    wait_on_dependent_grids();
    const unsigned call = begin_call(calls, parity);
    const long long slot = static_cast<long long>(call % 2) * ranks * capacity + row * count;
    const auto line_of = [&](int reader, int source, int line) {
        return reinterpret_cast<uint4*>(bases[reader] + lines) + (slot + source * capacity + line) * PARTS + part;
    };
    const auto has_values = [&](int line) { return part < FLAG && line * FLAG + part < total; };
    for (int begin = first; begin - ahead < count; begin += AT_ONCE * STRIDE) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int line = begin + n * STRIDE;
            x[n] = make_uint4(call, call, call, call);
            if (has_values(line)) x[n] = reinterpret_cast<const uint4*>(partial)[line * FLAG + part];
        }
        push_lines(x, begin, STRIDE, count, rank, ranks, line_of);
    }
    Patience waiting = {calls, failure, patience};
    for (int begin = first; begin - ahead < count; begin += AT_ONCE * STRIDE) {
        float4 own[AT_ONCE], before[AT_ONCE], sum[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int line = begin + n * STRIDE, i = line * FLAG + part;
            if (!has_values(line)) continue;
            own[n] = reinterpret_cast<const float4*>(partial)[i];
            before[n] = reinterpret_cast<const float4*>(residual)[i];
        }
        sum_lines(own, sum, begin, STRIDE, count, call, rank, ranks, waiting, line_of);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int line = begin + n * STRIDE, i = line * FLAG + part;
            if (!has_values(line)) continue;
            float4 y = sum[n];
            if (bias != nullptr) y = add4(y, reinterpret_cast<const float4*>(bias)[i]);
            y = add4(before[n], rounded4(y));
            reinterpret_cast<float4*>(residual)[i] = sums[i] = y;
        }
    }
    __syncthreads();
    float v[VECTORS][8];
    int columns[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        columns[i] = (i * NORM_THREADS + static_cast<int>(threadIdx.x)) * 8;
        load8(reinterpret_cast<const float*>(sums) + (columns[i] < k ? columns[i] : 0), v[i]);
        zero_tail(v[i], columns[i], k);
    }
    const NormParams<WholeVectors<NORM_THREADS>> norm = {norm_weight, norm_bias, eps, k, k};
    float top = normalise_row<NORM_THREADS, CENTER, !ROTATED>(v, norm, scratch);
    if constexpr (ROTATED) {
        rotate_row(v, rotation, rotation_scale);
        top = row_max<NORM_THREADS>(v, scratch, 1);
    }
    const RowScale s = row_scale(top);
    if (threadIdx.x == 0) scales[row] = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (columns[i] < k)
            *reinterpret_cast<uint2*>(codes + row * codes_pitch + columns[i]) = quantize8(v[i], s.ratio);
}

// The same in two shots, for the most values: a rank gets all ranks' values of its share of the vectors, and sends the
// sums to all, as fp16 where they are rounded anyhow. A block waits for the blocks of its number alone. All blocks must
// be resident at once.
template <bool ADD>
__global__ void __launch_bounds__(THREADS) all_reduce_shares(
    const float* partial, long long pitch, const float* bias, float* out, long long out_pitch, int rows, int n,
    const unsigned long long* bases, unsigned* calls, int* failure, int rank, int ranks, int parity, long long small,
    long long share, long long large, unsigned long long patience) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Layout layout = {small, share, large, ranks};
    const unsigned call = begin_call(calls, parity);
    const int slot = call % 2, peer = threadIdx.x;
    const bool has_peer = peer < ranks && peer != rank;  // this thread signals to a peer, and waits for it
    const long long width = (n + 3) / 4, total = rows * width, stride = static_cast<long long>(gridDim.x) * THREADS;
    const long long first = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const long long each = (total + ranks - 1) / ranks;
    Patience waiting = {calls, failure, patience};

    for (int hop = 1; hop < ranks; ++hop) {
        const int owner = (rank + hop) % ranks;
        const long long begin = owner * each, end = min(total, begin + each);
        float4* to = layout.parts(bases[owner], slot, rank);
#pragma unroll 4
        for (long long i = begin + first; i < end; i += stride) to[i - begin] = vector_at(partial, pitch, width, i);
    }
    __threadfence_system();
    __syncthreads();
    if (has_peer) {
        store_release(layout.flag(bases[peer], 0, rank, blockIdx.x), call);
        while (load_acquire(layout.flag(bases[rank], 0, peer, blockIdx.x)) != call && waiting.goes_on(peer));
    }
    __syncthreads();

    const long long begin = rank * each, end = min(total, begin + each);
    for (long long i = begin + first; i < end; i += stride) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (int source = 0; source < ranks; ++source) {
            const float4 x = source == rank ? vector_at(partial, pitch, width, i)
                                            : __ldcg(layout.parts(bases[rank], slot, source) + (i - begin));
            sum = source == 0 ? x : add4(sum, x);
        }
        if (bias != nullptr) sum = add4(sum, reinterpret_cast<const float4*>(bias)[i % width]);
        for (int hop = 1; hop < ranks; ++hop) {
            float4* to = layout.sums(bases[(rank + hop) % ranks], slot);
            if (ADD)
                reinterpret_cast<uint2*>(to)[i] = make_uint2(pack_half2(sum.x, sum.y), pack_half2(sum.z, sum.w));
            else
                to[i] = sum;
        }
        put<ADD>(out, out_pitch, width, i, sum);
    }
    __threadfence_system();
    __syncthreads();
    if (has_peer) {
        store_release(layout.flag(bases[peer], 1, rank, blockIdx.x), call);
        while (load_acquire(layout.flag(bases[rank], 1, peer, blockIdx.x)) != call && waiting.goes_on(peer));
    }
    __syncthreads();

    const float4* sums = layout.sums(bases[rank], slot);
    for (int hop = 1; hop < ranks; ++hop) {
        const int owner = (rank + hop) % ranks;
        const long long begin = owner * each, end = min(total, begin + each);
#pragma unroll 4
        for (long long i = begin + first; i < end; i += stride) {
            float4 sum;
            if (ADD) {
                const uint2 packed = __ldcg(reinterpret_cast<const uint2*>(sums) + i);
                const float2 low = unpack_half2(packed.x), high = unpack_half2(packed.y);
                sum = make_float4(low.x, low.y, high.x, high.y);
            } else {
                sum = __ldcg(sums + i);
            }
            put<ADD>(out, out_pitch, width, i, sum);
        }
    }
}

// Behind a step with an odd number of calls: the number of the next call, where a step looks for it.
__global__ void __launch_bounds__(1) end_odd_step(unsigned* calls) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    calls[0] = calls[1];
}
