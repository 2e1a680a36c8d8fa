// The experts of a few tokens, bound by reading the weights of the chosen experts: w8a8, from the router's logits to
// the result in two kernels. Each block chooses the experts itself, which takes less time than a launch.
//
//     hidden[p] = fp16(f(gate) * up) of pair p, with [gate, up] = scaled(codes[token] @ weight[expert].T) + bias
//     out[t]  (+)= sum over j of weights[t, j] * fp16(scaled(quantize(rotate(hidden[t, j])) @ weight[expert].T) + bias)
//                 + gate[t] * addend[t]
//
// The codes of the tokens are those of rotated tokens where the first matrices rotate their input. The rotation of the
// hidden values may be left out.
//
// codes: int8 [tokens, pitch]; x_scale: fp32 [tokens]; weight: int8 [experts, n, pitch]; w_scale, bias: fp32 [experts,
// n]; hidden: fp16 [pairs, hidden_pitch]; out: fp32 [tokens, out_pitch]. The rows of gate and up alternate in groups of
// eight. The sums are exact, so the work divides among blocks and warps as in gemv.cu.
//
// The first kernel lets the second one start when it has waited for the logits. So the second one chooses and loads its
// first weights while the first one computes.
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "experts/activation.cuh"
#include "experts/routing.cuh"
#include "experts/row_stream.cuh"

using namespace bminf;

// Blocks on an SM: one of this kernel and one of the next.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int BLOCKS_PER_SM = 2;
#else
constexpr int BLOCKS_PER_SM = 1;
#endif

// The choice of a block's tokens.
struct Choice {
    int ids[MAX_FEW_PAIRS];
    float weights[MAX_FEW_PAIRS];

    // One warp for each token. scratch: shared memory for that, which may be used for copies afterwards.
    template <int EACH>
    __device__ __forceinline__ void make(const float* logits, const Router& router, int tokens, char* scratch) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (warp < tokens) {
            int id;
            float weight;
            WarpRouter<EACH>(router, reinterpret_cast<RoutingScratch*>(scratch)[warp])
                .choose(logits + warp * router.num_experts, id, weight);
            if (lane < router.top_k) {
                ids[warp * router.top_k + lane] = id;
                weights[warp * router.top_k + lane] = weight;
            }
        }
#if __CUDA_ARCH__ >= 900
        fence_proxy_async();
#endif
        __syncthreads();
    }
};

// The block's share of `all` outputs.
struct Share {
    int first, count;

    __device__ __forceinline__ explicit Share(int all) {
        first = static_cast<int>(static_cast<long long>(all) * blockIdx.x / gridDim.x);
        count = static_cast<int>(static_cast<long long>(all) * (blockIdx.x + 1) / gridDim.x) - first;
    }
};

// The rows of the first product: local row r of a block is output r, or with GATED first the gates of all outputs.
template <bool GATED>
struct HiddenRows {
    const int8* weight;
    const int* ids;
    int first, count, features, pitch;

    __device__ __forceinline__ int output(int row) const { return first + (GATED && row >= count ? row - count : row); }
    // The number of a row among those of all experts.
    __device__ __forceinline__ int index(int row) const {
        const int pair = output(row) / features, feature = output(row) % features;
        if constexpr (!GATED) return ids[pair] * features + feature;
        return ids[pair] * 2 * features + feature / 8 * 16 + feature % 8 + (row >= count ? 8 : 0);
    }
    __device__ __forceinline__ const int8* operator()(int row) const {
        return weight + static_cast<size_t>(index(row)) * pitch;
    }
};

// EACH: experts of a lane, see WarpRouter. F: see expert_activation. U: chunks of a unit. k: elements of a row of
// codes, a multiple of 16. With scales_input the weights of the experts multiply the scales of their input. The first
// block writes topk_ids and topk_weights, [tokens, top_k]. Dynamic shared memory: from 9.0 on the pipelines, else
// RoutingScratch for each token; tokens * width bytes of codes, where `width` is the pitch rounded up to whole units; a
// sum for each row that the block has.
template <int EACH, bool GATED, int F, int U>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_hidden(
    const Router router, const float* logits, int* topk_ids, float* topk_weights, const int8* codes,
    const float* x_scale, const int8* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, __half* hidden, long long hidden_pitch, int tokens, int features, int k, int pitch,
    bool scales_input, float limit, float alpha, int scratch_bytes) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Choice choice;
    __shared__ float scales[MAX_FEW_PAIRS];  // of the pairs' inputs
    const int width = (pitch + U * FEW_CHUNK - 1) / (U * FEW_CHUNK) * (U * FEW_CHUNK), top_k = router.top_k;
    const Share share(tokens * top_k * features);
    const int rows = GATED ? 2 * share.count : share.count;
    int8* tokens_codes = reinterpret_cast<int8*>(shared + scratch_bytes);
    int* sums = reinterpret_cast<int*>(tokens_codes + tokens * width);
    using Rows = HiddenRows<GATED>;
    using Stream = RowStream<U, Rows>;
    __shared__ __align__(8) unsigned long long barriers[ROW_WARPS * Stream::STAGES];
    for (int i = threadIdx.x; i < rows; i += FEW_THREADS) sums[i] = 0;
    wait_on_dependent_grids();
    launch_dependent_grids();
    // The last warps copy the codes while the first ones choose.
    for (int i = FEW_THREADS - 1 - threadIdx.x; i < tokens * width / 16; i += FEW_THREADS) {
        const int token = i / (width / 16), column = i % (width / 16) * 16;
        const int4 zeros = {};
        *reinterpret_cast<int4*>(tokens_codes + token * width + column) =
            column < k ? __ldcg(reinterpret_cast<const int4*>(codes + static_cast<size_t>(token) * pitch + column))
                       : zeros;
    }
    choice.make<EACH>(logits, router, tokens, shared);
    if (threadIdx.x < tokens * top_k) {
        const float scale = __ldcg(x_scale + threadIdx.x / top_k);
        scales[threadIdx.x] = scales_input ? __fmul_rn(scale, choice.weights[threadIdx.x]) : scale;
        if (blockIdx.x == 0) {
            topk_ids[threadIdx.x] = choice.ids[threadIdx.x];
            topk_weights[threadIdx.x] = choice.weights[threadIdx.x];
        }
    }
    const Rows of_block = {weight, choice.ids, share.first, share.count, features, pitch};
    const RowUnits units(rows, width / (U * FEW_CHUNK));
    Stream stream(of_block, units, pitch, shared, barriers);
    multiply_units<U>(
        stream, units,
        [&](int row) {
            return tokens == 1 ? tokens_codes : tokens_codes + of_block.output(row) / features / top_k * width;
        },
        sums);
    __syncthreads();
    for (int i = threadIdx.x; i < share.count; i += FEW_THREADS) {
        const int pair = (share.first + i) / features, feature = (share.first + i) % features;
        float y[2] = {};
#pragma unroll
        for (int m = 0; m <= GATED; ++m) {
            const int row = i + m * share.count, index = of_block.index(row);
            y[m] = scaled(__int2float_rn(sums[row]), scales[pair], w_scale[index]);
            if (bias) y[m] = __fadd_rn(y[m], bias[index]);
        }
        hidden[pair * hidden_pitch + feature] =
            __float2half_rn(expert_activation<GATED, F>(y[0], y[1], {limit, alpha}));
    }
}

// The rows of the second product: local row r of a block is pair r / count and column r % count of its share.
struct DownRows {
    const int8* weight;
    const int* ids;
    int first, count, columns, pitch;

    __device__ __forceinline__ int index(int row) const { return ids[row / count] * columns + first + row % count; }
    __device__ __forceinline__ const int8* operator()(int row) const {
        return weight + static_cast<size_t>(index(row)) * pitch;
    }
};

// Eight elements of a row between the two passes of quantize_pairs over it: as they are in memory, or rotated.
template <bool ROTATED>
struct PairVector {
    using Top = unsigned;
    static constexpr int HELD = 4;  // vectors of a thread that stay in registers
    uint4 raw;

    __device__ __forceinline__ void rotate(int, float) {}
    __device__ __forceinline__ void add_to(Top& top) const { top = packed_max(top, raw); }
    __device__ __forceinline__ static float value(Top top) { return larger_of(top); }
    __device__ __forceinline__ void get(float (&x)[8]) const { load8(reinterpret_cast<const __half*>(&raw), x); }
};

template <>
struct PairVector<true> {
    using Top = float;
    static constexpr int HELD = 2;
    uint4 raw;
    float v[1][8];

    // Called by all lanes of a warp, which have neighbouring vectors.
    __device__ __forceinline__ void rotate(int rotation, float rotation_scale) {
        load8(reinterpret_cast<const __half*>(&raw), v[0]);
        rotate_row<false>(v, rotation, rotation_scale);
    }
    __device__ __forceinline__ void add_to(Top& top) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[0][j]);
    }
    __device__ __forceinline__ static float value(Top top) { return top; }
    __device__ __forceinline__ void get(float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = v[0][j];
    }
};

// Quantizes rows of fp16, ROTATED or not, into shared memory, with zeros up to `width`, and their scales:
// backend/quantization.py. All warps take part: those of a group have one row at a time.
template <bool ROTATED>
__device__ __forceinline__ void quantize_pairs(
    const __half* rows, long long rows_pitch, int pairs, int k, int width, int rotation, float rotation_scale,
    int8* codes, float* scales) {
    using Vector = PairVector<ROTATED>;
    constexpr int HELD = Vector::HELD;
    __shared__ float tops[ROW_WARPS];
    int group = ROW_WARPS;  // warps of a row, a power of two
    while (group > 1 && group * pairs > ROW_WARPS) group /= 2;
    const int warp = threadIdx.x / WARP, at_once = ROW_WARPS / group, step = group * WARP * 8;
    const int thread = threadIdx.x % (group * WARP);
    for (int base = 0; base < pairs; base += at_once) {
        const int row = base + warp / group;
        const bool exists = row < pairs;
        const __half* x = rows + (exists ? row : 0) * rows_pitch;
        const auto load = [&](int column) {
            Vector vector;
            vector.raw = {};
            if (exists && column < k) vector.raw = ld_global_cg_v4(x + column), zero_tail(vector.raw, column, k);
            return vector;
        };
        Vector held[HELD];
        typename Vector::Top top = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) held[i] = load(i * step + thread * 8);
#pragma unroll
        for (int i = 0; i < HELD; ++i) held[i].rotate(rotation, rotation_scale), held[i].add_to(top);
        for (int first = HELD * step; first < k; first += step) {
            Vector vector = load(first + thread * 8);
            vector.rotate(rotation, rotation_scale);
            vector.add_to(top);
        }
        const float own = warp_absmax(Vector::value(top));
        __syncthreads();  // the maxima of the rows before have been read
        if (threadIdx.x % WARP == 0) tops[warp] = own;
        __syncthreads();
        float largest = 0;
        for (int w = 0; w < group; ++w) largest = absmax(largest, tops[warp / group * group + w]);
        const RowScale s = row_scale(largest);
        if (!exists) continue;
        if (thread == 0) scales[row] = s.scale;
        const auto store = [&](const Vector& vector, int column) {
            float v[8];
            vector.get(v);
            if (column < width) *reinterpret_cast<uint2*>(codes + row * width + column) = quantize8(v, s.ratio);
        };
#pragma unroll
        for (int i = 0; i < HELD; ++i) store(held[i], i * step + thread * 8);
        for (int first = HELD * step; first < width; first += step) {
            Vector vector = load(first + thread * 8);
            vector.rotate(rotation, rotation_scale);
            store(vector, first + thread * 8);
        }
    }
}

// k: elements of a row of `hidden`, whose pitch in the weight is `pitch`. ADD: to fp32 values in memory. ROTATED: the
// rows are rotated in blocks of `rotation` elements. addend: fp32 [tokens, addend_pitch] or null; gate: [tokens], or
// null for ones. With scales_input the results are added as they are. Dynamic shared memory as above, with pairs *
// width bytes of codes; then an fp32 scale and an fp32 bias for each row that the block has.
template <int EACH, bool ADD, int U, bool ROTATED>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_down(
    const Router router, const float* logits, const __half* hidden, long long hidden_pitch,
    const int8* __restrict__ weight, const float* __restrict__ w_scale, const float* __restrict__ bias, float* out,
    long long out_pitch, int tokens, int columns, int k, int pitch, bool scales_input, int rotation,
    float rotation_scale, const float* addend, long long addend_pitch, const float* gate, int scratch_bytes) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Choice choice;
    __shared__ float x_scales[MAX_FEW_PAIRS];
    const int width = (pitch + U * FEW_CHUNK - 1) / (U * FEW_CHUNK) * (U * FEW_CHUNK), top_k = router.top_k;
    const int pairs = tokens * top_k;
    const Share share(columns);
    const int rows = pairs * share.count;
    int8* codes = reinterpret_cast<int8*>(shared + scratch_bytes);
    int* sums = reinterpret_cast<int*>(codes + pairs * width);
    float* w_scales = reinterpret_cast<float*>(sums + rows);
    float* biases = w_scales + rows;
    using Stream = RowStream<U, DownRows>;
    __shared__ __align__(8) unsigned long long barriers[ROW_WARPS * Stream::STAGES];
    launch_dependent_grids();
    choice.make<EACH>(logits, router, tokens, shared);
    const DownRows of_block = {weight, choice.ids, share.first, share.count, columns, pitch};
    const RowUnits units(rows, width / (U * FEW_CHUNK));
    Stream stream(of_block, units, pitch, shared, barriers);
    for (int i = threadIdx.x; i < rows; i += FEW_THREADS) {
        const int index = of_block.index(i);
        sums[i] = 0, w_scales[i] = w_scale[index], biases[i] = bias ? bias[index] : 0.0f;
    }
    wait_on_dependent_grids();
    quantize_pairs<ROTATED>(hidden, hidden_pitch, pairs, k, width, rotation, rotation_scale, codes, x_scales);
    __syncthreads();
    multiply_units<U>(stream, units, [&](int row) { return codes + row / of_block.count * width; }, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * share.count; i += FEW_THREADS) {
        const int token = i / share.count, column = i % share.count;
        float total = 0;
        for (int j = 0; j < top_k; ++j) {
            const int pair = token * top_k + j, row = pair * share.count + column;
            float y = scaled(__int2float_rn(sums[row]), x_scales[pair], w_scales[row]);
            if (bias) y = __fadd_rn(y, biases[row]);
            y = __fmul_rn(scales_input ? 1.0f : choice.weights[pair], rounded(y));
            total = j == 0 ? y : __fadd_rn(total, y);
        }
        if (addend) {
            const float other = __ldcg(addend + token * addend_pitch + share.first + column);
            total = __fadd_rn(total, __fmul_rn(gate ? __ldcg(gate + token) : 1.0f, other));
        }
        float* target = out + token * out_pitch + share.first + column;
        *target = ADD ? __fadd_rn(*target, total) : total;
    }
}
