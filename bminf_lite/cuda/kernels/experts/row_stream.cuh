// Rows of int8 weights for one warp of a matrix-vector product, as in gemv.cu: the rows of a block are cut into units
// of U chunks of 512 bytes of one row, which its warps take in turn.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/experts.cuh"

namespace bminf {

constexpr int ROW_WARPS = FEW_THREADS / WARP;
constexpr int PIPELINE_BYTES = PIPELINE_CHUNKS * FEW_CHUNK;  // of a warp; a whole number of units for every U

__device__ __forceinline__ int dot16(const int4& a, const int4& b, int acc) {
    acc = __dp4a(a.x, b.x, acc);
    acc = __dp4a(a.y, b.y, acc);
    acc = __dp4a(a.z, b.z, acc);
    return __dp4a(a.w, b.w, acc);
}

// Adds to shared memory.
__device__ __forceinline__ void red_shared(int* p, int x) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(cast_smem_ptr_to_uint(p)), "r"(x) : "memory");
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
#endif
}

// The rows of a block: the rows from `first` on, `size` of them, of each of the block's experts, one after another. The
// block may begin within the first of these. ids: of the experts, in shared memory; each: rows of an expert.
struct ExpertRows {
    const int8* weight;
    const int* ids;
    int each, first, size, pitch;

    // The number of a row among those of all experts.
    __device__ __forceinline__ int index(int expert, int place) const { return ids[expert] * each + first + place; }
    __device__ __forceinline__ const int8* address(int expert, int place) const {
        return weight + static_cast<size_t>(index(expert, place)) * pitch;
    }
};

// The units of one warp: every ROW_WARPS-th unit of the block, as a segment of a row. `row` counts the block's rows; it
// is row `place` of those of the block's expert `expert`.
struct RowUnits {
    int row, expert, place, segment, segments, size, row_step, segment_step, remaining;

    // rows: of the block, which begins with row `place` of its first expert.
    __device__ __forceinline__ RowUnits(int rows, int segments, int size, int begin) : segments(segments), size(size) {
        const int warp = warp_index();
        row = warp / segments, segment = warp % segments;
        expert = 0, place = begin + row;
        skip();
        row_step = ROW_WARPS / segments, segment_step = ROW_WARPS % segments;
        const int total = rows * segments;
        remaining = total > warp ? (total - warp + ROW_WARPS - 1) / ROW_WARPS : 0;
    }
    __device__ __forceinline__ void next() {
        int step = row_step;
        segment += segment_step, --remaining;
        if (segment >= segments) segment -= segments, ++step;
        row += step, place += step;
        skip();
    }

private:
    __device__ __forceinline__ void skip() {
        while (place >= size) place -= size, ++expert;
    }
};

// The pipeline through which a warp reads its units. From 9.0 on it consists of STAGES units in shared memory, filled
// by bulk copies; before, of the next unit in registers. `unit` is the next unit to be loaded, `oldest` the stage of
// the next to be multiplied.
template <int U>
struct RowStream {
    static constexpr int UNIT = U * FEW_CHUNK;
    const ExpertRows& rows;
    int lane;
    RowUnits unit;
#if __CUDA_ARCH__ >= 900
    static constexpr int STAGES = PIPELINE_BYTES / UNIT;
    unsigned stages, barriers;
    PipelineState oldest{STAGES};
#else
    static constexpr int STAGES = 1;
    int4 loaded[U];
#endif

    // Shared memory of the block: `pipelines`, ROW_WARPS * PIPELINE_BYTES, and `all_barriers`, ROW_WARPS * STAGES.
    __device__ __forceinline__
    RowStream(const ExpertRows& rows, const RowUnits& first, char* pipelines, unsigned long long* all_barriers)
        : rows(rows),
          lane(threadIdx.x % WARP),
          unit(first) {
#if __CUDA_ARCH__ >= 900
        const int warp = warp_index();
        stages = cast_smem_ptr_to_uint(pipelines + warp * PIPELINE_BYTES);
        barriers = cast_smem_ptr_to_uint(all_barriers + warp * STAGES);
        if (lane == 0) {
#pragma unroll 1
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#endif
    }

    // Starts to load the first units. No thread uses the pipelines for anything else any more.
    __device__ __forceinline__ void start() {
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) load(i);
    }

    // Starts to load the warp's next unit.
    __device__ __forceinline__ void load(int stage) {
        if (unit.remaining <= 0) return;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            const int column = unit.segment * UNIT, bytes = min(UNIT, rows.pitch - column);
            mbarrier_arrive_expect_tx(barriers + 8 * stage, bytes);
            cp_async_bulk(
                stages + stage * UNIT, rows.address(unit.expert, unit.place) + column, bytes, barriers + 8 * stage);
        }
#else
        const int column = unit.segment * UNIT + lane * 16;
        const int8* source = rows.address(unit.expert, unit.place) + column;
#pragma unroll
        for (int i = 0; i < U; ++i)
            loaded[i] = column + i * FEW_CHUNK < rows.pitch
                            ? __ldcs(reinterpret_cast<const int4*>(source + i * FEW_CHUNK))
                            : int4{};
#endif
        unit.next();
    }

    // The product of the oldest unit and the codes of its columns, in every lane; the next unit takes its place.
    __device__ __forceinline__ int multiply(const int4 (&codes)[U]) {
        int sum = 0;
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + 8 * oldest.index, oldest.phase);
        const unsigned source = stages + oldest.index * UNIT + lane * 16;
        int4 w[U];
#pragma unroll
        for (int i = 0; i < U; ++i) w[i] = ld_shared_v4(source + i * FEW_CHUNK);
#pragma unroll
        for (int i = 0; i < U; ++i) sum += dot16(w[i], codes[i], 0);
        if (unit.remaining > 0) fence_proxy_async();
        __syncwarp();
        load(oldest.index);
        oldest.next();
#else
        int4 w[U];
#pragma unroll
        for (int i = 0; i < U; ++i) w[i] = loaded[i];
        load(0);
#pragma unroll
        for (int i = 0; i < U; ++i) sum += dot16(w[i], codes[i], 0);
#endif
        return warp_sum(sum);
    }
};

// Adds the products of a warp's units, from `unit` on, to the sums of their rows. codes: a function from a unit to
// those of its row, with zeros up to whole units.
template <int U, class Codes>
__device__ __forceinline__ void multiply_units(RowStream<U>& stream, RowUnits unit, const Codes& codes, int* sums) {
    const int lane = threadIdx.x % WARP;
    int4 c[U];
    const int8* held = nullptr;  // whose codes are in c
#pragma unroll 1
    for (; unit.remaining > 0; unit.next()) {
        const int8* needed = codes(unit) + unit.segment * (U * FEW_CHUNK);
        if (needed != held) {
#pragma unroll
            for (int i = 0; i < U; ++i) c[i] = *reinterpret_cast<const int4*>(needed + lane * 16 + i * FEW_CHUNK);
            held = needed;
        }
        const int sum = stream.multiply(c);
        if (lane == 0) red_shared(sums + unit.row, sum);
    }
}

}  // namespace bminf
