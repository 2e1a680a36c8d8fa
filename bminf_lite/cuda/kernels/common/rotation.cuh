// The block Hadamard transform of a row in registers (bminf_lite/backend/rotation.py defines it).
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"

namespace bminf {

// The sums and differences of elements h apart among a thread's own.
template <int VECTORS>
__device__ __forceinline__ void add_pairs(float (&v)[VECTORS][8], int h) {
#pragma unroll
    for (int i = 0; i < 8 * VECTORS; ++i)
        if (!(i & h)) {
            float &x = v[i / 8][i % 8], &y = v[(i + h) / 8][(i + h) % 8];
            const float sum = __fadd_rn(x, y);
            y = __fsub_rn(x, y), x = sum;
        }
}

// The steps of a transform for the distances h = FIRST, 2 FIRST, ... up to LAST, as far as `block` has them, where a
// thread has both elements of each pair: those FIRST apart are OWN apart among its own.
template <int FIRST, int LAST, int OWN, int VECTORS>
__device__ __forceinline__ void add_steps(float (&v)[VECTORS][8], int block) {
    if (LAST < block) {  // without a condition for each step, behind which half of the registers would be copied
#pragma unroll
        for (int h = FIRST; h <= LAST; h *= 2) add_pairs(v, h / FIRST * OWN);
    } else {
#pragma unroll
        for (int h = FIRST; h <= LAST; h *= 2)
            if (h < block) add_pairs(v, h / FIRST * OWN);
    }
}

// The sums and differences of a transform of each `block` neighbouring elements of a row. A pair of elements h apart
// becomes their sum and their difference, for h = 1, 2, 4, ... in this order. A thread holds runs of RUN neighbouring
// elements, and the run behind its own is STEP lanes further. Pairs within a run are in registers, others in lanes of a
// warp, so `block` is at most WARP / STEP * RUN. All lanes of a warp must call this.
template <int RUN, int STEP, int VECTORS>
__device__ __forceinline__ void rotate_sums(float (&v)[VECTORS][8], int block) {
    add_steps<1, RUN / 2, 1>(v, block);
    for (int d = 1; d * RUN < block; d *= 2) {
        const float sign = threadIdx.x & (d * STEP) ? -1.0f : 1.0f;  // of this lane's own element
#pragma unroll
        for (int i = 0; i < 8 * VECTORS; ++i) {
            float& x = v[i / 8][i % 8];
            x = __fmaf_rn(sign, x, __shfl_xor_sync(FULL, x, d * STEP));  // a sum or a difference, rounded once
        }
    }
}

template <int VECTORS>
__device__ __forceinline__ void multiply(float (&v)[VECTORS][8], float scale) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], scale);
}

// The transform of a row of which a thread has vectors of eight elements, and the next lane the vectors behind them:
// the sums and differences, times `scale`, fp32(block^-0.5).
template <int VECTORS>
__device__ __forceinline__ void rotate_row(float (&v)[VECTORS][8], int block, float scale) {
    rotate_sums<8, 1>(v, block);
    multiply(v, scale);
}

// ---- rows of 16-bit elements -------------------------------------------------------------------------------------
//
// Neighbouring lanes load neighbouring vectors, so that a warp reads whole cache lines. Then they exchange vectors,
// still in 16 bits, until each has a run of VECTORS neighbours: most pairs of a transform lie in such a run.

// The column of a thread's vector i when it is loaded.
template <int VECTORS>
__device__ __forceinline__ int loaded_column(int thread, int i) {
    return (thread / WARP * WARP * VECTORS + i * WARP + thread % WARP) * 8;
}

// The first column of its run. The run behind it is that of lane + VECTORS.
template <int VECTORS>
__device__ __forceinline__ int run_column(int thread) {
    const int lane = thread % WARP;
    return (thread / WARP * WARP * VECTORS + lane % VECTORS * WARP + lane / VECTORS * VECTORS) * 8;
}

// Lanes that differ in one bit exchange half of their vectors, for each bit of a vector's number.
template <int VECTORS>
__device__ __forceinline__ void gather_runs(uint4 (&raw)[VECTORS]) {
    const auto exchange = [](unsigned& low, unsigned& high, bool upper, int lanes) {
        const unsigned other = __shfl_xor_sync(FULL, upper ? low : high, lanes);
        low = upper ? other : low, high = upper ? high : other;
    };
#pragma unroll
    for (int s = 1; s < VECTORS; s *= 2) {
        const bool upper = threadIdx.x & s;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i & s) continue;
            exchange(raw[i].x, raw[i + s].x, upper, s), exchange(raw[i].y, raw[i + s].y, upper, s);
            exchange(raw[i].z, raw[i + s].z, upper, s), exchange(raw[i].w, raw[i + s].w, upper, s);
        }
    }
}

// The last step of a transform of fp16 elements. Returns a power of two by which the elements are still to be
// multiplied: `scale` is one if `block` is a power of four, and to multiply the row's maximum and ratio takes less time
// than to multiply all elements. Both give the same codes, as no product of sums of fp16 elements and `scale` is
// subnormal.
template <int VECTORS>
__device__ __forceinline__ float scale_or_factor(float (&v)[VECTORS][8], int block, float scale) {
    constexpr int POWERS_OF_FOUR = 0x155;
    if (VECTORS < 8 && block & POWERS_OF_FOUR) return scale;
    multiply(v, scale);
    return 1.0f;
}

// The same of a row whose elements a thread has as Layout says, WholeVectors or HalfVectors. Of halves a lane has two
// runs of four elements, 128 apart, of the 256 that its warp has in each vector. A transform of halves takes one
// exchange of lanes more than one of whole vectors of the same block, but for blocks of 256, where both take five.
template <class Layout, int VECTORS>
__device__ __forceinline__ void rotate_in_layout(float (&v)[VECTORS][8], int block, float scale) {
    if constexpr (!Layout::HALVES) {
        rotate_row(v, block, scale);
    } else {
        const auto pairs_in_lane = [&](int h) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (!(j & h)) {
                        const float sum = __fadd_rn(v[i][j], v[i][j + h]);
                        v[i][j + h] = __fsub_rn(v[i][j], v[i][j + h]), v[i][j] = sum;
                    }
        };
        if (1 < block) pairs_in_lane(1);
        if (2 < block) pairs_in_lane(2);
        for (int d = 1; d < WARP && 4 * d < block; d *= 2) {
            const float sign = threadIdx.x & d ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i][j] = __fmaf_rn(sign, v[i][j], __shfl_xor_sync(FULL, v[i][j], d));
        }
        if (4 * WARP < block) pairs_in_lane(4);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], scale);
    }
}

// ---- through shared memory ---------------------------------------------------------------------------------------
//
// A warp has 1,024 neighbouring elements of a row, 32 a lane. Where lanes exchange elements they write them to shared
// memory and read others, once for all steps that follow: an exchange between lanes takes as long as an access of one
// element in each lane, and a step would take one for each element. Behind that a lane has other elements.

constexpr int MOVED_VECTORS = 8 * WARP;      // of 16 bytes, in which rotate_moved exchanges the elements of a warp
constexpr int TURNED_PITCH = WARP + 4;       // fp32 values from one lane's to the next one's in rotate_turned
constexpr int TURNED = WARP * TURNED_PITCH;  // fp32 values in which rotate_turned exchanges the elements of a warp

// The sums and differences of a row of which a lane has 32 neighbours. Behind that v[r / 2][4 * (r % 2) + j] is the
// element moved_column() + 32 r + j of the warp's. moved: MOVED_VECTORS, from a multiple of 128 bytes on, which no lane
// reads any more.
__device__ __forceinline__ void rotate_moved(float (&v)[4][8], int block, unsigned moved) {
    add_steps<1, 16, 1>(v, block);
    const unsigned lane = threadIdx.x % WARP, place = lane % 8, own = moved + (lane - place) * 128 + place * 16;
#pragma unroll
    for (int r = 0; r < 8; ++r) {  // eight lanes write to, and then read from, different banks
        const float* x = v[r / 2] + r % 2 * 4;
        const uint4 raw =
            make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
        st_shared_v4(own + place * 128 ^ r * 16, raw);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        const int4 raw = ld_shared_v4((own ^ r * 16) + r * 128);
        float* x = v[r / 2] + r % 2 * 4;
        x[0] = __int_as_float(raw.x), x[1] = __int_as_float(raw.y);
        x[2] = __int_as_float(raw.z), x[3] = __int_as_float(raw.w);
    }
    add_steps<32, 128, 4>(v, block);
}

__device__ __forceinline__ int moved_column() {
    const int lane = threadIdx.x % WARP, place = lane % 8;
    return (lane - place) * 32 + place * 4;
}

// The transform of a row whose vectors lie as WholeVectors says: a lane has one vector of each of four blocks of 256
// elements. Behind that lane 8 i + j has the elements j of all vectors of block i, v[m / 8][m % 8] of vector m. turned:
// as above.
__device__ __forceinline__ void rotate_turned(float (&v)[4][8], int block, float scale, float* turned) {
    add_steps<1, 4, 1>(v, block);
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float* x = v[i / 2] + i % 2 * 4;
        *reinterpret_cast<float4*>(turned + lane * TURNED_PITCH + 4 * i) = make_float4(x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < WARP; ++m) v[m / 8][m % 8] = turned[m * TURNED_PITCH + lane];
    add_steps<8, 128, 1>(v, block);
    multiply(v, scale);
}

// The codes of four vectors that lanes have turned: from a word in each of four neighbouring lanes, whose bytes belong
// to four vectors, to a word for each vector, in the lanes of the same order.
__device__ __forceinline__ unsigned turn_codes(unsigned word) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    word = __byte_perm(word, __shfl_xor_sync(FULL, word, 2), upper ? 0x3276 : 0x5410);
    return __byte_perm(word, __shfl_xor_sync(FULL, word, 1), odd ? 0x3715 : 0x6240);
}

}  // namespace bminf
