// What the two ways to multiply a few rows share (skinny_float_gemm_hopper.cu): the pipeline of a block in shared
// memory, its work, and the epilogue.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/skinny_float_gemm_hopper.cuh"
#include "gemm/float_gemm.cuh"

namespace bminf {

constexpr int ROW = 2 * BLOCK;  // bytes of a row of a box

__device__ __forceinline__ constexpr int round_up(int x, int multiple) {
    return (x + multiple - 1) / multiple * multiple;
}

// What a stage holds: BOXES boxes of 128 bytes of `channels` rows of the weight, which are BLOCKS blocks of 64 columns;
// the activations of these columns, if they are not resident; the scales of GROUPS groups.
template <class W, int GROUP, class S>
struct Stage {
    static constexpr int IN_BOX = ROW / sizeof(W) / BLOCK, BLOCKS = BOXES * IN_BOX, COLUMNS = BLOCKS * BLOCK;
    static constexpr int GROUPS = GROUP ? COLUMNS / GROUP : 0;
    static_assert(GROUP == 0 || COLUMNS % GROUP == 0, "a stage has whole groups");
};

// The shared memory of a block:
//   pipeline     `stages` stages
//   x            the activations of all columns, if resident: for each block of 64 columns `rows` rows of 128 bytes
//   barriers     for each stage: the weight has arrived, the activations have arrived, all `warps` have read both;
//                and one for resident activations
// Warps read whole groups of eight rows of x, so the last block is followed by memory that may hold anything.
template <class W, int GROUP, class S>
struct SharedMemory {
    using Contents = Stage<W, GROUP, S>;
    unsigned pipeline, barriers, x;
    int rows, channels, warps, stages, box, scales, scale_box, stage;  // bytes but for the first four
    bool resident;

    __device__ __forceinline__
    SharedMemory(const char* shared, int rows, int channels, int warps, int stages, bool resident, bool gated)
        : rows(rows),
          channels(channels),
          warps(warps),
          stages(stages),
          resident(resident) {
        box = channels * ROW;
        scales = BOXES * box;
        scale_box = round_up(Contents::GROUPS * (gated ? channels / 2 : channels) * sizeof(S), 128);
        const int activations = round_up(scales + (GROUP ? 2 * scale_box : 0), 1024);
        stage = round_up(activations + (resident ? 0 : Contents::BLOCKS * rows * ROW), 1024);
        barriers = cast_smem_ptr_to_uint(shared);
        pipeline = barriers + 1024;
        x = resident ? pipeline + stages * stage : pipeline + activations;
    }
    __device__ __forceinline__ unsigned weight(int i) const { return pipeline + i * stage; }
    __device__ __forceinline__ unsigned scale(int i, int matrix) const {
        return weight(i) + scales + matrix * scale_box;
    }
    // The block of activations `block` of a step, in stage i.
    __device__ __forceinline__ unsigned activations(int step, int i, int block) const {
        return x + (resident ? step * Contents::BLOCKS * rows * ROW : i * stage) + block * rows * ROW;
    }
    __device__ __forceinline__ unsigned weight_full(int i) const { return barriers + 24 * i; }
    __device__ __forceinline__ unsigned activations_full(int i) const { return weight_full(i) + 8; }
    __device__ __forceinline__ unsigned empty(int i) const { return weight_full(i) + 16; }
    __device__ __forceinline__ unsigned resident_full() const { return weight_full(stages); }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            mbarrier_init(weight_full(i), 1);
            mbarrier_init(activations_full(i), 1);
            mbarrier_init(empty(i), warps);
        }
        mbarrier_init(resident_full(), 1);
        fence_mbarrier_init();
    }
};

// The tiles of a block, one after another: `tiles` of `channels` rows of the weight in all, `steps` stages each.
struct WorkTiles {
    int tiles, steps;

    __device__ __forceinline__ int count() const {
        const int first = blockIdx.x;
        return first < tiles ? (tiles - first + gridDim.x - 1) / gridDim.x : 0;
    }
    __device__ __forceinline__ int tile(int i) const { return blockIdx.x + i * gridDim.x; }
};

// The operands of the epilogue, and `count` outputs for each of `rows` rows. A row of the weight has `groups` groups.
struct Outputs {
    const float *w_scale, *bias;
    void* out;
    long long pitch;
    int rows, count, groups;
    bool waits;  // for the kernel's predecessor, before they are written
};

// What a thread writes of a tile. A warp has 16 rows of it: 16 channels, or with GATED 8 of the gate and 8 of up. The
// thread has rows t / 4 and t / 4 + 8 of these, of `channel` and of the eighth one behind it, or of its gate and up.
template <int EPILOGUE, int F, bool SCALED>
struct TileOutputs {
    static constexpr bool IS_GATED = EPILOGUE == GATED;
    const Outputs& outputs;
    int channel;
    ChannelOperands channels[2];

    // first: the first row of the tile in the weight.
    __device__ __forceinline__ TileOutputs(const Outputs& outputs, int first) : outputs(outputs) {
        const int warp = threadIdx.x / WARP, r = threadIdx.x % WARP / 4;
        channel = (first + warp * STEP) / (IS_GATED ? 2 : 1) + r;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = channel + h * (IS_GATED ? outputs.count : 8);
            const bool inside = (IS_GATED ? channel : at) < outputs.count;
            channels[h].scale = SCALED && inside ? __ldg(outputs.w_scale + at) : 0.0f;
            channels[h].bias = outputs.bias && inside ? __ldg(outputs.bias + at) : 0.0f;
        }
    }
    // sums: of tiles of 8 rows of x, as the tensor cores leave them.
    template <int TILES>
    __device__ __forceinline__ void write(const float (&sums)[TILES][4]) const {
        const bool is_biased = outputs.bias != nullptr;
        if (outputs.waits) wait_on_dependent_grids();
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int j = 0; j < (IS_GATED ? 2 : 4); ++j) {
                const int row = n * 8 + threadIdx.x % 4 * 2 + j % 2, at = channel + j / 2 * 8;
                if (row >= outputs.rows || at >= outputs.count) continue;
                const size_t index = row * outputs.pitch + at;
                const float y = output_value<SCALED>(sums[n][j], channels[j / 2], is_biased);
                const float up = IS_GATED ? output_value<SCALED>(sums[n][(j + 2) % 4], channels[1], is_biased) : 0.0f;
                float residual = 0;
                if constexpr (EPILOGUE == ADD) residual = __ldcg(static_cast<const float*>(outputs.out) + index);
                store_output<EPILOGUE, F>(outputs.out, index, y, up, residual);
            }
    }
};

// The scale of this thread's row `half` of its warp's 16 for a group of a stage.
template <class S, bool IS_GATED, class Memory>
__device__ __forceinline__ float group_scale(const Memory& shared, int stage, int group, int half) {
    const int warp = threadIdx.x / WARP, r = threadIdx.x % WARP / 4;
    const int columns = IS_GATED ? shared.channels / 2 : shared.channels;
    const int at = group * columns + (IS_GATED ? warp * 8 + r : warp * STEP + r + half * 8);
    return ld_shared_scale<S>(shared.scale(stage, IS_GATED ? half : 0) + at * sizeof(S));
}

}  // namespace bminf
