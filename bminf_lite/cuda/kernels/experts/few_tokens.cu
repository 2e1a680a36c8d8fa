// The experts of a few tokens, bound by reading the weights of the chosen experts: w8a8, from the router's logits to
// the result in two kernels. Each block chooses the experts itself, which takes less time than a launch.
//
//     hidden[p] = fp16(f(gate) * up) of pair p, with [gate, up] = scaled(codes[token] @ weight[expert].T) + bias
//     out[t]  (+)= sum over j of weights[t, j] * fp16(scaled(quantize(hidden[t, j]) @ weight[expert].T) + bias)
//
// codes: int8 [tokens, pitch]; x_scale: fp32 [tokens]; weight: int8 [experts, n, pitch]; w_scale, bias: fp32 [experts,
// n]; hidden: fp16 [pairs, hidden_pitch]; out: fp32 [tokens, out_pitch]. The rows of gate and up alternate in groups of
// eight. The sums are exact, so the work divides among blocks and warps as in gemv.cu.
//
// The first kernel lets the second one start when it has waited for the logits. So the second one chooses and loads its
// first weights while the first one computes.
#include "common/common.cuh"
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

// The choice of a block's tokens, by one warp for each token.
template <int EACH>
struct Choice {
    int ids[MAX_FEW_PAIRS];
    float weights[MAX_FEW_PAIRS];

    // scratch: shared memory, which may be used for copies afterwards.
    __device__ __forceinline__ void choose(const float* logits, const Router& router, int tokens, char* scratch) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (warp < tokens) {
            const int id = router_of(router, scratch).choose(logits + warp * router.num_experts);
            if (lane < router.top_k) ids[warp * router.top_k + lane] = id;
        }
        finish();
    }
    __device__ __forceinline__ void weigh(const float* logits, const Router& router, int tokens, char* scratch) {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        if (warp < tokens) {
            const int id = lane < router.top_k ? ids[warp * router.top_k + lane] : 0;
            const float weight = router_of(router, scratch).weigh(logits + warp * router.num_experts, id);
            if (lane < router.top_k) weights[warp * router.top_k + lane] = weight;
        }
        finish();
    }

private:
    __device__ __forceinline__ static WarpRouter<EACH> router_of(const Router& router, char* scratch) {
        return {router, reinterpret_cast<RoutingScratch<EACH>*>(scratch)[threadIdx.x / WARP]};
    }
    __device__ __forceinline__ static void finish() {
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
    const Router router, const float* logits, const int8* codes, const float* x_scale, const int8* __restrict__ weight,
    const float* __restrict__ w_scale, const float* __restrict__ bias, __half* hidden, long long hidden_pitch,
    int tokens, int features, int k, int pitch, bool scales_input, float limit, float alpha, int scratch_bytes) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Choice<EACH> choice;
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
    const Rows of_block = {weight, choice.ids, share.first, share.count, features, pitch};
    const RowUnits units(rows, width / (U * FEW_CHUNK));
    Stream stream(of_block, units, pitch, shared, barriers);
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
    const bool has_pair = threadIdx.x < tokens * top_k;
    const float scale = has_pair ? __ldcg(x_scale + threadIdx.x / top_k) : 0.0f;
    choice.choose(logits, router, tokens, shared);
    if (scales_input) choice.weigh(logits, router, tokens, shared);
    if (has_pair) scales[threadIdx.x] = scales_input ? __fmul_rn(scale, choice.weights[threadIdx.x]) : scale;
    stream.start();
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

// Quantizes rows of fp16 into shared memory, with zeros up to `width`, and their scales: backend/quantization.py. All
// warps take part: those of a group have one row at a time.
__device__ __forceinline__ void quantize_pairs(
    const __half* rows, long long rows_pitch, int pairs, int k, int width, int8* codes, float* scales) {
    constexpr int HELD = 4;  // vectors that stay in registers between the two passes over a row
    __shared__ float tops[ROW_WARPS];
    int group = ROW_WARPS;  // warps of a row, a power of two
    while (group > 1 && group * pairs > ROW_WARPS) group /= 2;
    const int warp = threadIdx.x / WARP, at_once = ROW_WARPS / group, lanes = group * WARP;
    const int thread = threadIdx.x % lanes;
    for (int base = 0; base < pairs; base += at_once) {
        const int row = base + warp / group;
        const bool exists = row < pairs;
        const __half* x = rows + (exists ? row : 0) * rows_pitch;
        const auto vector_at = [&](int column) {
            uint4 x8 = {};
            if (exists && column < k) x8 = ld_global_cg_v4(x + column), zero_tail(x8, column, k);
            return x8;
        };
        uint4 held[HELD];
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) held[i] = vector_at((i * lanes + thread) * 8);
#pragma unroll
        for (int i = 0; i < HELD; ++i) top = packed_max(top, held[i]);
        for (int column = (HELD * lanes + thread) * 8; column < k; column += lanes * 8)
            top = packed_max(top, vector_at(column));
        const float own = warp_absmax(larger_of(top));
        __syncthreads();  // the maxima of the rows before have been read
        if (threadIdx.x % WARP == 0) tops[warp] = own;
        __syncthreads();
        float largest = 0;
        for (int w = 0; w < group; ++w) largest = absmax(largest, tops[warp / group * group + w]);
        const RowScale s = row_scale(largest);
        if (!exists) continue;
        if (thread == 0) scales[row] = s.scale;
        const auto store = [&](const uint4& x8, int column) {
            float v[8];
            load8(reinterpret_cast<const __half*>(&x8), v);
            if (column < width) *reinterpret_cast<uint2*>(codes + row * width + column) = quantize8(v, s.ratio);
        };
#pragma unroll
        for (int i = 0; i < HELD; ++i) store(held[i], (i * lanes + thread) * 8);
        for (int column = (HELD * lanes + thread) * 8; column < width; column += lanes * 8)
            store(vector_at(column), column);
    }
}

// k: elements of a row of `hidden`, whose pitch in the weight is `pitch`. ADD: to fp32 values in memory. With
// scales_input the results are added as they are. The first block writes topk_ids and topk_weights, [tokens, top_k].
// Dynamic shared memory as above, with pairs * width bytes of codes; then an fp32 scale and an fp32 bias for each row
// that the block has.
template <int EACH, bool ADD, int U>
__global__ void __launch_bounds__(FEW_THREADS, BLOCKS_PER_SM) few_tokens_down(
    const Router router, const float* logits, int* topk_ids, float* topk_weights, const __half* hidden,
    long long hidden_pitch, const int8* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, float* out, long long out_pitch, int tokens, int columns, int k, int pitch,
    bool scales_input, int scratch_bytes) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Choice<EACH> choice;
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
    choice.choose(logits, router, tokens, shared);
    choice.weigh(logits, router, tokens, shared);
    const DownRows of_block = {weight, choice.ids, share.first, share.count, columns, pitch};
    const RowUnits units(rows, width / (U * FEW_CHUNK));
    Stream stream(of_block, units, pitch, shared, barriers);
    stream.start();
    for (int i = threadIdx.x; i < rows; i += FEW_THREADS) {
        const int index = of_block.index(i);
        sums[i] = 0, w_scales[i] = w_scale[index], biases[i] = bias ? bias[index] : 0.0f;
    }
    wait_on_dependent_grids();
    if (blockIdx.x == 0 && threadIdx.x < pairs) {
        topk_ids[threadIdx.x] = choice.ids[threadIdx.x];
        topk_weights[threadIdx.x] = choice.weights[threadIdx.x];
    }
    quantize_pairs(hidden, hidden_pitch, pairs, k, width, codes, x_scales);
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
        float* target = out + token * out_pitch + share.first + column;
        *target = ADD ? __fadd_rn(*target, total) : total;
    }
}
