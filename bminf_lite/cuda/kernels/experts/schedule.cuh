// How the tiles of a product with sorted pairs are numbered. Tiles of rows belong to one expert each, and those of an
// expert have the same number of rows, give or take GRANULE: nothing is padded to the largest expert.
#pragma once
#include "common/common.cuh"
#include "constants/experts.cuh"

namespace bminf {

// `rows` sorted rows from `row` on, of `expert`, times the weight's tile `weight_tile`.
struct ExpertTile {
    int expert, row, rows, weight_tile;
};

// In shared memory: for each expert its first row and its first tile of rows, and where they end.
struct ExpertTiles {
    int offsets[MAX_EXPERTS + 1], starts[MAX_EXPERTS + 1];

    // Called by all threads of a block. ROWS: rows of a tile at most.
    template <int ROWS>
    __device__ __forceinline__ void load(const int* expert_offsets, int experts) {
        for (int i = threadIdx.x; i <= experts; i += blockDim.x) offsets[i] = __ldcg(expert_offsets + i);
        __syncthreads();
        if (threadIdx.x < WARP) {
            const int each = (experts + WARP - 1) / WARP, first = threadIdx.x * each;
            int own = 0;
            for (int i = first; i < min(first + each, experts); ++i) own += tiles_of<ROWS>(i);
            int sum = own;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                const int other = __shfl_up_sync(FULL, sum, d);
                if (threadIdx.x >= d) sum += other;
            }
            int start = sum - own;
            for (int i = first; i < min(first + each, experts); ++i) starts[i] = start, start += tiles_of<ROWS>(i);
            if (threadIdx.x == WARP - 1) starts[experts] = sum;
        }
        __syncthreads();
    }

    // Tile `index` of those of all experts, the tiles of the weight one after another for each tile of rows. ROWS: as
    // above, a multiple of GRANULE, as is the height of a tile but the last. Indices are below starts[experts] *
    // weight_tiles.
    template <int GRANULE = 8>
    __device__ __forceinline__ ExpertTile find(int index, int experts, int weight_tiles) const {
        const int row_tile = index / weight_tiles;
        int expert = 0, end = experts;  // starts[expert] <= row_tile < starts[end]
        while (end - expert > 1) {
            const int middle = (expert + end) / 2;
            if (starts[middle] <= row_tile)
                expert = middle;
            else
                end = middle;
        }
        const int tiles = starts[expert + 1] - starts[expert], rows = offsets[expert + 1] - offsets[expert];
        const int height = ((rows + tiles - 1) / tiles + GRANULE - 1) / GRANULE * GRANULE,
                  first = (row_tile - starts[expert]) * height;
        return {expert, offsets[expert] + first, min(height, rows - first), index % weight_tiles};
    }

private:
    template <int ROWS>
    __device__ __forceinline__ int tiles_of(int expert) const {
        return (offsets[expert + 1] - offsets[expert] + ROWS - 1) / ROWS;
    }
};

}  // namespace bminf
