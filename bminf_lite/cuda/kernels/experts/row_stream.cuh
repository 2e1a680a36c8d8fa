// Rows of int8 weights for one warp of a matrix-vector product, as in gemv.cu: the rows of a block are cut into units
// of up to four chunks of 512 bytes of one row, which its warps take in turn.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/experts.cuh"
#include "experts/slots.cuh"

namespace bminf {

constexpr int ROW_WARPS = FEW_THREADS / WARP;
constexpr int PIPELINE_BYTES = PIPELINE_CHUNKS * FEW_CHUNK;  // of a warp

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

constexpr int GATE_GROUP = 8;  // rows of the gate, or of up, that lie together

// The matrix of an expert that every token has, or null, and its scales. Its hidden values are those of `shared_parts`
// of the others, and each part of them counts as an expert. The first matrix is [shared_parts * n, pitch] with the
// pitch of the others, gate and up one behind the other. The second one is [n, shared_pitch], where a part has
// neighbouring columns.
struct SharedExpert {
    const int8* shared_weight;
    const float* shared_scale;
    int shared_parts, shared_pitch;
};

// A matrix of experts and its scales: int8 [experts, each, pitch], or in slots (slots.cuh), and fp32 [experts, each];
// and that of the shared one, whose parts have the numbers SHARED, SHARED - 1 and so on. part_rows, part_columns: where
// a part begins behind the one before.
struct ExpertMatrix {
    static constexpr int SHARED = -1;
    const int8* weight;
    const int* slots;
    const float* w_scale;
    const SharedExpert& shared;
    int each, pitch, part_rows, part_columns;

    __device__ __forceinline__ const int8* rows_of(int id) const {
        if (id <= SHARED)
            return shared.shared_weight + static_cast<size_t>(SHARED - id) * (part_rows * pitch + part_columns);
        return weight + static_cast<size_t>(slot_of(slots, id)) * each * pitch;
    }
    __device__ __forceinline__ const float* scales_of(int id) const {
        return id <= SHARED ? shared.shared_scale + (SHARED - id) * part_rows : w_scale + id * each;
    }
    // Row `row` of an expert, those of gate and up in groups, as it is counted in memory from the first of a part.
    template <bool GATED>
    __device__ __forceinline__ int row_of(int id, int row) const {
        if (!GATED || id > SHARED) return row;
        const int up = shared.shared_parts * part_rows;
        return row / (2 * GATE_GROUP) * GATE_GROUP + row % GATE_GROUP + (row & GATE_GROUP ? up : 0);
    }
    // The pitch of an expert's rows.
    __device__ __forceinline__ int pitch_of(int id) const { return id <= SHARED ? shared.shared_pitch : pitch; }
};

// The rows of a block: the rows from `first` on, `size` of them, of each of the block's experts, one after another. The
// block may begin within the first of these. starts: where the experts' rows are, in shared memory; ids: their numbers.
// GATED: they are rows of gate and up.
template <bool GATED>
struct ExpertRows {
    const ExpertMatrix& matrix;
    const int8* const* starts;
    const int* ids;
    int first, size;

    __device__ __forceinline__ const int8* address(int expert, int place) const {
        const int id = ids[expert], row = matrix.row_of<GATED>(id, first + place);
        return starts[expert] + static_cast<size_t>(row) * matrix.pitch_of(id);
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

// The pipeline through which a warp reads its units. From 9.0 on it consists of STAGES units in shared memory. Each
// lane copies what it will read itself, 16 bytes of each chunk, so that lanes do not wait for each other. A bulk copy
// would take one instruction for a unit, but units are small, and small bulk copies were slower (docs/kernels.md).
// Before 9.0 it consists of the next unit in registers. `unit` is the next unit to be loaded, `oldest` the stage of the
// next to be multiplied. UNIT: bytes of a unit, a multiple of 256.
template <int UNIT, bool GATED>
struct RowStream {
    static constexpr int CHUNKS = (UNIT + FEW_CHUNK - 1) / FEW_CHUNK;
    const ExpertRows<GATED>& rows;
    int lane;
    RowUnits unit;
#if __CUDA_ARCH__ >= 900
    static constexpr int STAGES = PIPELINE_BYTES / UNIT;
    unsigned stages;  // the lane's part
    int oldest = 0;
#else
    int4 loaded[CHUNKS];
#endif

    // pipelines: ROW_WARPS * PIPELINE_BYTES of shared memory.
    __device__ __forceinline__ RowStream(const ExpertRows<GATED>& rows, const RowUnits& first, char* pipelines)
        : rows(rows),
          lane(threadIdx.x % WARP),
          unit(first) {
#if __CUDA_ARCH__ >= 900
        stages = cast_smem_ptr_to_uint(pipelines + warp_index() * PIPELINE_BYTES) + lane * 16;
#endif
    }

    // Whether the lane has a part of chunk i of a unit: half of them have none of the last chunk of some units.
    __device__ __forceinline__ bool has_part(int i) const {
        return (i + 1) * FEW_CHUNK <= UNIT || i * FEW_CHUNK + lane * 16 < UNIT;
    }

    // Starts to load the first units. No thread uses the pipelines for anything else any more.
    __device__ __forceinline__ void start() {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) load(i);
#else
        load(0);
#endif
    }

    // The product of the oldest unit and the codes of its columns, in every lane; the next unit takes its place.
    __device__ __forceinline__ int multiply(const int4 (&codes)[CHUNKS]) {
        int sum = 0;
        int4 w[CHUNKS];
#if __CUDA_ARCH__ >= 900
        cp_async_wait_group<STAGES - 1>();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            w[i] = has_part(i) ? ld_shared_v4(stages + oldest * UNIT + i * FEW_CHUNK) : int4{};
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) sum += dot16(w[i], codes[i], 0);
        load(oldest);
        if (++oldest == STAGES) oldest = 0;
#else
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) w[i] = loaded[i];
        load(0);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) sum += dot16(w[i], codes[i], 0);
#endif
        return warp_sum(sum);
    }

private:
    // Starts to load the warp's next unit, if there is one.
    __device__ __forceinline__ void load(int stage) {
        if (unit.remaining > 0) {
            const int column = unit.segment * UNIT + lane * 16;
            const int8* source = rows.address(unit.expert, unit.place) + column;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                const bool exists = has_part(i) && column + i * FEW_CHUNK < rows.matrix.pitch;
#if __CUDA_ARCH__ >= 900
                if (exists) cp_async_16_evict_first(stages + stage * UNIT + i * FEW_CHUNK, source + i * FEW_CHUNK);
#else
                loaded[i] = exists ? __ldcs(reinterpret_cast<const int4*>(source + i * FEW_CHUNK)) : int4{};
#endif
            }
            unit.next();
        }
#if __CUDA_ARCH__ >= 900
        cp_async_commit_group();  // an empty one too: the wait counts groups
#endif
    }
};

// Adds the products of a warp's units, from `unit` on, to the sums of their rows. codes: a function from a unit to
// those of its row, with zeros up to whole units. requested: is called behind each unit from that on with which the
// warp has started its last load.
template <int UNIT, bool GATED, class Codes, class Requested>
__device__ __forceinline__ void multiply_units(
    RowStream<UNIT, GATED>& stream, RowUnits unit, const Codes& codes, int* sums, const Requested& requested) {
    const int lane = threadIdx.x % WARP;
    constexpr int CHUNKS = RowStream<UNIT, GATED>::CHUNKS;
    int4 c[CHUNKS];
    const int8* held = nullptr;  // whose codes are in c
#pragma unroll 1
    for (; unit.remaining > 0; unit.next()) {
        const int8* needed = codes(unit) + unit.segment * UNIT;
        if (needed != held) {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
                c[i] = stream.has_part(i) ? *reinterpret_cast<const int4*>(needed + lane * 16 + i * FEW_CHUNK) : int4{};
            held = needed;
        }
        const int sum = stream.multiply(c);
        if (stream.unit.remaining <= 0) requested();
        if (lane == 0) red_shared(sums + unit.row, sum);
    }
}

}  // namespace bminf
