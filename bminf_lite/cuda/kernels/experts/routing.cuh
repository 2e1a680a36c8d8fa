// The choice of a token's experts by one warp: backend/routing.py, bit for bit.
#pragma once
#include "common/bfloat16.cuh"
#include "common/common.cuh"
#include "constants/experts.cuh"

namespace bminf {

// RouterSpec with its vectors, fp32 [num_experts] or null. weight_type is an index of WEIGHT_TYPES.
struct Router {
    const float *correction_bias, *expert_scale;
    int num_experts, top_k, score, renormalise, num_groups, top_groups, group_score, masked, weight_type;
    float epsilon, min_sum, scale, closeness;
};

// With the macro SPARSE_MIXER_ROUTER the router's score is that one, else another.
#ifdef SPARSE_MIXER_ROUTER
constexpr bool MIXES_SPARSELY = true;
#else
constexpr bool MIXES_SPARSELY = false;
#endif

// exp(x), each operation rounded on its own.
__device__ __forceinline__ float portable_exp(float x) {
    x = x < -87.0f ? -87.0f : x;  // unlike fminf and fmaxf, these keep NaN
    x = x > 87.0f ? 87.0f : x;
    const float n = rintf(__fmul_rn(x, 1.44269504088896341f));
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, -2.12194440e-4f));
    constexpr float COEFFICIENTS[5] = {
        1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    float p = 1.9875691500e-4f;
#pragma unroll
    for (int i = 0; i < 5; ++i) p = __fadd_rn(__fmul_rn(p, r), COEFFICIENTS[i]);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    return __fmul_rn(p, __int_as_float((__float2int_rn(n) + 127) << 23));
}

// Larger scores have larger keys; 0 equals -0, and NaN counts as minus infinity. Every key is above 0.
__device__ __forceinline__ unsigned ranking_key(float x) {
    const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
    if (x != x) return 0x007fffffu;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of_key(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ unsigned warp_max(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x = max(x, __shfl_xor_sync(FULL, x, d));
    return x;
#endif
}

__device__ __forceinline__ int warp_min(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x = min(x, __shfl_xor_sync(FULL, x, d));
    return x;
#endif
}

// Shared memory of a warp that chooses among groups.
struct RoutingScratch {
    unsigned keys[MAX_EXPERTS];
    float groups[MAX_EXPERTS];
};

// A token's experts in a warp: lane t has the experts t + 32 i.
template <int EACH>
struct WarpRouter {
    const Router& router;
    RoutingScratch& scratch;
    float scores[EACH];
    unsigned keys[EACH];

    __device__ __forceinline__ WarpRouter(const Router& router, RoutingScratch& scratch)
        : router(router),
          scratch(scratch) {}
    __device__ __forceinline__ static int expert(int i) { return i * WARP + threadIdx.x % WARP; }
    __device__ __forceinline__ bool exists(int i) const { return expert(i) < router.num_experts; }

    // The chosen expert of rank t, in lane t < top_k. logits: [num_experts].
    __device__ __forceinline__ int choose(const float* logits) {
        load(logits);
        if (!by_logit()) find_scores();
        rank();
        if (router.top_groups < router.num_groups) mask_groups();
        return take_largest();
    }

    // The weight of lane t's expert, of rank t, as choose found it; in lanes t < top_k. It has no part in the choice,
    // so it may be found later: from the logits again, which takes fewer registers than to keep the scores.
    __device__ __forceinline__ float weight(const float* logits, int id) {
        load(logits);
        if constexpr (MIXES_SPARSELY) {
            float found = mixed_sparsely(id);
            finish(id, found);
            return found;
        }
        find_scores();
        float found = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float score = __shfl_sync(FULL, scores[i], id % WARP);
            if (id / WARP == i) found = score;
        }
        finish(id, found);
        return found;
    }

private:
    __device__ __forceinline__ bool by_logit() const {
        return !router.correction_bias && router.top_groups == router.num_groups;
    }
    __device__ __forceinline__ void load(const float* logits) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) scores[i] = exists(i) ? __ldcg(logits + expert(i)) : 0.0f;
    }

    // Makes scores of the logits.
    __device__ __forceinline__ void find_scores() {
        if (router.score == SIGMOID) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) scores[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, portable_exp(-scores[i])));
        } else if (router.score == SOFTMAX) {
            softmax();
        }
    }

    __device__ __forceinline__ void softmax() {
        unsigned largest = 0;
        bool is_nan = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (exists(i)) largest = max(largest, ranking_key(scores[i])), is_nan |= scores[i] != scores[i];
        const float top = __any_sync(FULL, is_nan) ? NAN_F : value_of_key(warp_max(largest));
        float sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            scores[i] = exists(i) ? portable_exp(__fsub_rn(scores[i], top)) : 0.0f;
            sum = i == 0 ? scores[i] : __fadd_rn(sum, scores[i]);
        }
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
#pragma unroll
        for (int i = 0; i < EACH; ++i) scores[i] = __fdiv_rn(scores[i], sum);
    }

    // The softmax of lane t's expert over those that no earlier rank has and whose logits are close; see sparse_mixer
    // in backend/routing.py.
    __device__ __forceinline__ float mixed_sparsely(int id) const {
        unsigned taken = 0;
        float found = 0;
#pragma unroll 1
        for (int rank = 0; rank < router.top_k; ++rank) {
            const int chosen = __shfl_sync(FULL, id, rank);
            float top = 0, sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float logit = __shfl_sync(FULL, scores[i], chosen % WARP);
                if (chosen / WARP == i) top = logit;
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float magnitude = fabsf(scores[i]);
                const float distance = __fdiv_rn(__fsub_rn(top, scores[i]), magnitude < top ? top : magnitude);
                const bool competes = exists(i) && !(taken >> i & 1) && !(distance > router.closeness);
                const float power = competes ? portable_exp(__fsub_rn(scores[i], top)) : 0.0f;
                sum = i == 0 ? power : __fadd_rn(sum, power);
            }
#pragma unroll
            for (int d = WARP / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
            if (threadIdx.x % WARP == rank) found = __fdiv_rn(1.0f, sum);
            if (threadIdx.x % WARP == chosen % WARP) taken |= 1u << chosen / WARP;
        }
        return found;
    }

    // The keys by which experts are chosen: of the logits, or of the scores.
    __device__ __forceinline__ void rank() {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            keys[i] = 0;
            if (!exists(i)) continue;
            const float bias = router.correction_bias ? router.correction_bias[expert(i)] : 0.0f;
            keys[i] = ranking_key(router.correction_bias ? __fadd_rn(scores[i], bias) : scores[i]);
        }
    }

    // Replaces the keys of experts outside the best groups.
    __device__ __forceinline__ void mask_groups() {
        const int lane = threadIdx.x % WARP, size = router.num_experts / router.num_groups;
        __syncwarp();  // the scratch may have been read for another token
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (exists(i)) scratch.keys[expert(i)] = keys[i];
        __syncwarp();
#pragma unroll 1
        for (int group = lane; group < router.num_groups; group += WARP) {
            unsigned first = 0, second = 0;
#pragma unroll 1
            for (int i = 0; i < size; ++i) {
                const unsigned key = scratch.keys[group * size + i];
                second = max(second, min(first, key)), first = max(first, key);
            }
            float score = value_of_key(first);
            if (router.group_score == TOP_TWO) score = __fadd_rn(score, value_of_key(second));
            scratch.groups[group] = value_of_key(ranking_key(score));
        }
        __syncwarp();
        const unsigned outside = router.masked == ZERO ? ranking_key(0.0f) : ranking_key(-INF_F);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (!exists(i)) continue;
            const int own = expert(i) / size;
            const float score = scratch.groups[own];
            int better = 0;
#pragma unroll 1
            for (int group = 0; group < router.num_groups; ++group) {
                const float other = scratch.groups[group];
                better += other > score || (other == score && group < own);
            }
            if (better >= router.top_groups) keys[i] = outside;
        }
    }

    // The expert with the largest key is taken top_k times; lane t gets the one of rank t.
    __device__ __forceinline__ int take_largest() {
        const int lane = threadIdx.x % WARP;
        int id = 0;
#pragma unroll 1
        for (int rank = 0; rank < router.top_k; ++rank) {
            unsigned own = keys[0];
            int best = expert(0);  // the lane's first with its largest key
#pragma unroll
            for (int i = 1; i < EACH; ++i)
                if (keys[i] > own) own = keys[i], best = expert(i);
            const int first = warp_min(own == warp_max(own) ? best : MAX_EXPERTS);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (first == expert(i)) keys[i] = 0;
            if (lane == rank) id = first;
        }
        return id;
    }

    // The sum over the ranks, from rank 0 on.
    __device__ __forceinline__ float sum_by_rank(float weight) const {
        float sum = __shfl_sync(FULL, weight, 0);
#pragma unroll 1
        for (int rank = 1; rank < router.top_k; ++rank) sum = __fadd_rn(sum, __shfl_sync(FULL, weight, rank));
        return sum;
    }

    __device__ __forceinline__ void finish(int id, float& weight) const {
        if (router.score == SOFTMAX_OF_CHOSEN) {
            weight = portable_exp(__fsub_rn(weight, __shfl_sync(FULL, weight, 0)));
            weight = __fdiv_rn(weight, sum_by_rank(weight));
        }
        if (router.renormalise) {
            const float sum = __fadd_rn(sum_by_rank(weight), router.epsilon);
            weight = __fdiv_rn(weight, sum < router.min_sum ? router.min_sum : sum);
        }
        weight = __fmul_rn(weight, router.scale);
        if (router.expert_scale) weight = __fmul_rn(weight, router.expert_scale[id]);
        if (router.weight_type == FLOAT16) weight = rounded(weight);
        if (router.weight_type == BFLOAT16) weight = __bfloat162float(__float2bfloat16_rn(weight));
    }
};

}  // namespace bminf
