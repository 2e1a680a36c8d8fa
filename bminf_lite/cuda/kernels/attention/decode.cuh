// The work of decode attention: which blocks compute which segments, and the merge of the segments' records.
//
// An item is one segment of the context of one pair (sequence, group of query heads). Items are in order of sequence,
// group and segment. Either a unit (1, 2, 4 or 8 blocks of a cluster) computes one item, which its index names, or
// every block finds a range of items from the lengths of the contexts. The distribution changes no bit of a result.
#pragma once
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/counters.cuh"
#include "constants/decode.cuh"

namespace bminf {

constexpr int COST_KEYS = 128;  // an item costs 1, and 1 more for each COST_KEYS keys

// The keys of a sequence that its query sees, and their segments. Without any key there is one empty segment.
struct KeyRange {
    int begin, end, first, last;

    __device__ __forceinline__ KeyRange(int begin, int end)
        : begin(begin),
          end(end),
          first(begin / SEGMENT),
          last(max(0, end - 1) / SEGMENT) {}
    __device__ __forceinline__ int segments() const { return last - first + 1; }
    // The cost of all segments, and of those before `segment`. EVEN: every segment costs 1.
    __device__ __forceinline__ int cost(bool even) const {
        return even ? segments() : segments() + (end + COST_KEYS - 1) / COST_KEYS - begin / COST_KEYS;
    }
    __device__ __forceinline__ int cost_before(int segment, bool even) const {
        if (segment == first) return 0;
        return segment - first + (even ? 0 : segment * (SEGMENT / COST_KEYS) - begin / COST_KEYS);
    }
    // The first segment for which cost_before is at least `cost`; last + 1 if there is none.
    __device__ __forceinline__ int segment_from(int cost, bool even) const {
        if (cost <= 0) return first;
        constexpr int EACH = 1 + SEGMENT / COST_KEYS;
        return min(
            last + 1, even ? first + cost : max(first + 1, (cost + first + begin / COST_KEYS + EACH - 1) / EACH));
    }
};

// lengths: int32 [sequences], the tokens in the cache before the step; for CROSS the lengths of the sources. groups:
// groups of query heads of a sequence. limit: tokens that fit into a row of the block table.
struct Contexts {
    const int* lengths;
    int sequences, groups, window, limit;

    template <int KIND>
    __device__ __forceinline__ KeyRange range(int sequence) const {
        const int end = min(lengths[sequence] + (KIND == CROSS ? 0 : 1), limit);
        return {window > 0 ? max(0, end - window) : 0, end};
    }
};

// The range of items that one block computes: those whose cost_before, over all items, is in [from, to). Or, if
// records of all items would not fit into memory (whole), all items of the pairs that begin there.
struct Share {
    bool even, whole;
    int from, to;
};

// One item. start: the cost of all pairs before its own. records: the items of all sequences before its own.
struct Item {
    int sequence, group, segment, start, records;
    KeyRange range;

    template <int KIND>
    __device__ __forceinline__ void next(const Contexts& contexts, const Share& share) {
        if (segment < range.last) {
            ++segment;
            return;
        }
        start += range.cost(share.even);
        if (++group == contexts.groups) {
            records += range.segments() * contexts.groups, group = 0;
            if (++sequence < contexts.sequences) range = contexts.range<KIND>(sequence);
        }
        segment = range.first;
    }
    __device__ __forceinline__ bool belongs_to(const Contexts& contexts, const Share& share) const {
        return sequence < contexts.sequences &&
               start + (share.whole ? 0 : range.cost_before(segment, share.even)) < share.to;
    }
    // Whether the block's items of this pair include `which`, if they include a segment before it.
    __device__ __forceinline__ bool reaches(int which, const Share& share) const {
        return share.whole || start + range.cost_before(which, share.even) < share.to;
    }
    // The number of the item's record.
    __device__ __forceinline__ int record() const { return records + group * range.segments() + segment - range.first; }
};

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#endif
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
}

// The sum of x over this lane and those before it.
__device__ __forceinline__ int warp_prefix_sum(int x) {
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int before = __shfl_up_sync(FULL, x, d);
        if (threadIdx.x % WARP >= d) x += before;
    }
    return x;
}

// Finds the share of this block, and its first item. Called by one warp. capacity: records that fit into memory, at
// least the number of blocks.
template <int KIND>
__device__ __forceinline__ Item find_work(const Contexts& contexts, int capacity, Share& share) {
    const int lane = threadIdx.x % WARP, blocks = gridDim.x, number = blockIdx.x;
    int items = 0, cost = 0;
    for (int i = lane; i < contexts.sequences; i += WARP) {
        const KeyRange range = contexts.range<KIND>(i);
        items += range.segments(), cost += range.cost(false);
    }
    items = warp_sum(items) * contexts.groups, cost = warp_sum(cost) * contexts.groups;
    share.even = items <= blocks, share.whole = items > capacity;
    share.from = number, share.to = number + 1;
    Item item = {contexts.sequences, 0, 0, 0, 0, KeyRange(0, 0)};
    if (share.even && number >= items) return item;
    if (!share.even) {
        const unsigned each = static_cast<unsigned>(cost) / blocks, rest = cost - each * blocks;
        share.from = number * each + number * rest / blocks;
        share.to = (number + 1) * each + (number + 1) * rest / blocks;
    }
    for (int i = 0, start = 0, records = 0; i < contexts.sequences; i += WARP) {
        int own_items = 0, own_cost = 0;
        KeyRange range(0, 0);
        if (i + lane < contexts.sequences) {
            range = contexts.range<KIND>(i + lane);
            own_items = range.segments() * contexts.groups, own_cost = range.cost(share.even) * contexts.groups;
        }
        const int items_to = records + warp_prefix_sum(own_items), cost_to = start + warp_prefix_sum(own_cost);
        const unsigned here = __ballot_sync(FULL, share.from < cost_to);
        if (here) {
            const int from = __ffs(here) - 1;
            item.sequence = i + from, item.start = __shfl_sync(FULL, cost_to - own_cost, from);
            item.records = __shfl_sync(FULL, items_to - own_items, from);
            item.range = {__shfl_sync(FULL, range.begin, from), __shfl_sync(FULL, range.end, from)};
            break;
        }
        records = __shfl_sync(FULL, items_to, WARP - 1), start = __shfl_sync(FULL, cost_to, WARP - 1);
    }
    if (item.sequence >= contexts.sequences) return item;
    const int pair = item.range.cost(share.even), from = share.from - item.start;
    item.group = from / pair, item.start += item.group * pair;
    item.segment = item.range.segment_from(from - item.group * pair, share.even);
    if (item.segment > item.range.last || (share.whole && item.segment > item.range.first))
        item.segment = item.range.last, item.next<KIND>(contexts, share);
    return item;
}

// ---- records -----------------------------------------------------------------------------------------------------

// The records of a unit's block `rank`, which has the WIDTH elements from rank * WIDTH on of each head: outputs [HEADS,
// WIDTH], and (m, l) [HEADS].
template <int D, int WIDTH>
struct Records {
    static constexpr int FLOATS = HEADS * (D + 2 * MAX_UNIT);  // of all blocks of a unit
    float* data;
    int rank;

    __device__ __forceinline__ float* outputs(int record, int head) const {
        return data + static_cast<size_t>(record) * FLOATS + rank * HEADS * (WIDTH + 2) + head * WIDTH;
    }
    __device__ __forceinline__ float2* sums(int record, int head) const {
        return reinterpret_cast<float2*>(outputs(record, HEADS)) + head;
    }
};

constexpr int MERGED = 2 * WARP;                                       // records that are merged at a time, at most
constexpr int MOST_PARTS = 8, PART_RECORDS = 4, PART_ELEMENTS = WARP;  // see log2_parts_of

// Shared memory of BYTES bytes for the merge of records: for each of them and each head the factors of what is merged
// already and of the record, and the record's sum of weights; what is merged already; the outputs of the records.
template <int WIDTH, int BYTES>
struct MergeScratch {
    static constexpr int COPIED = (BYTES - MERGED * HEADS * 12 - HEADS * WIDTH * 4 - 2 * HEADS * 4) / 4;
    static_assert(COPIED >= HEADS * WIDTH, "one record fits");
    float2 factors[MERGED][HEADS];
    float record_sums[MERGED][HEADS];
    float2 outputs[HEADS * WIDTH / 2];
    float sums[2][HEADS];
    alignas(16) float copied[COPIED];
};

// The largest scores of two neighbouring records, and their sums of weights. A lane of a warp has records 2 * lane and
// 2 * lane + 1 of n.
struct RecordSums {
    float2 x[2];

    template <int D, int WIDTH>
    __device__ __forceinline__ void load(const Records<D, WIDTH>& records, int from, int n, int head) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int s = threadIdx.x % WARP * 2 + i;
            x[i] = s < n ? __ldcg(records.sums(from + s, head)) : make_float2(-INF_F, 0.0f);
        }
    }
    // Finds the factors of the warp's records. top: the largest score of the records before, -INF_F for none.
    template <class Scratch>
    __device__ __forceinline__ void find_factors(int head, float& top, Scratch& scratch) const {
        const int lane = threadIdx.x % WARP;
        float highest = fmaxf(top, fmaxf(x[0].x, x[1].x));  // up to these records
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) highest = fmaxf(highest, __shfl_up_sync(FULL, highest, d));
        float before = __shfl_up_sync(FULL, highest, 1);
        if (lane == 0) before = top;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const MergeFactors merging = merge_factors(before, x[i].x);
            scratch.factors[2 * lane + i][head] = make_float2(merging.left, merging.right);
            scratch.record_sums[2 * lane + i][head] = x[i].y;
            before = merging.top;
        }
        top = __shfl_sync(FULL, highest, WARP - 1);
    }
};

// The logarithm of the number of parts in which `segments` records of `elements` elements are merged, if each is of a
// block of its own. The blocks of the last segments merge a part each, and wait for the others. They are at most one
// block in PART_RECORDS, so those that they wait for always find a place on the GPU.
__device__ __forceinline__ int log2_parts_of(int segments, int elements) {
    return 31 - __clz(min(MOST_PARTS, max(1, min(segments / PART_RECORDS, elements / PART_ELEMENTS))));
}

// Counts the `written` records of a pair that has `segments`. When all are there, merges them from the left and writes
// the outputs of `count` heads to `out`, up to element head_dim of each. If there is one part, the last block to arrive
// does it. Otherwise `written` is 1, and the block of record `index` merges part segments - 1 - index, if there is one.
// With HAS_SINKS the `sinks` fp32 [count] are merged behind the records. Called by THREADS threads, of which `sync` is
// the barrier. counter: 0 before and after.
template <int THREADS, bool HAS_SINKS, int D, int WIDTH, int BYTES, class Sync>
__device__ __forceinline__ void merge_records(
    Sync sync, const Records<D, WIDTH>& records, int first, int index, int written, int segments, int log2_parts,
    int* counter, __half* out, int count, int head_dim, const float* sinks, MergeScratch<WIDTH, BYTES>& scratch) {
    static_assert(THREADS >= HEADS * WARP, "a warp for each head");
    const int parts = 1 << log2_parts, part = parts > 1 ? segments - 1 - index : 0;
    __shared__ bool is_last;
    __shared__ float2 factors_of_sinks[HEADS];
    sync();
    if (part >= parts) {
        if (threadIdx.x == 0) red_add_release(counter, 1);
        return;
    }
    if (threadIdx.x == 0) {
        if (parts > 1) {
            red_add_release(counter, 1);
            while (ld_acquire(counter) < segments) {
            }
        } else {
            is_last = atomic_add_acq_rel(counter, written) + written == segments;
        }
        if (parts > 1 || is_last) red_increment(counter, segments + parts - 1);
    }
    sync();
    if (parts == 1 && !is_last) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int elements = count * WIDTH >> log2_parts, column = part * elements;
    const int most =
        segments <= MERGED && segments * elements <= scratch.COPIED ? segments : min(MERGED, scratch.COPIED / elements);
    const bool has_head = warp >= column / WIDTH && warp * WIDTH < column + elements;  // head number `warp`
    float top = -INF_F;                                                                // of that head
    int parity = 0;
#pragma unroll 1
    for (int from = 0; from < segments; from += most, parity ^= 1) {
        const int n = min(most, segments - from);
        if (from > 0) sync();
        RecordSums record_sums;
        if (has_head) record_sums.load(records, first + from, n, warp);
#pragma unroll 1
        for (int s = warp; s < n; s += THREADS / WARP)
#pragma unroll 1
            for (int i = lane * 4; i < elements; i += WARP * 4)
                cp_async_16(&scratch.copied[s * elements + i], records.outputs(first + from + s, 0) + column + i);
        if (has_head) record_sums.find_factors(warp, top, scratch);
        if (HAS_SINKS && has_head && lane == 0 && from + n == segments) {
            const MergeFactors merging = sink_factors(top, sinks + warp);
            factors_of_sinks[warp] = make_float2(merging.left, merging.right);
        }
        cp_async_wait_all();
        sync();
#pragma unroll 1
        for (int i = threadIdx.x; i < elements / 2; i += THREADS) {
            const int head = (column + 2 * i) / WIDTH, own = (column + 2 * i) % WIDTH;
            // What is merged already. -0 changes no bit of the first record.
            float2 o = from == 0 ? make_float2(-0.0f, -0.0f) : scratch.outputs[i];
            float sum = from == 0 ? 0.0f : scratch.sums[parity][head];
            const auto add = [&](int s, bool is_there) {
                const float2 f = scratch.factors[s][head];
                const float2 x = reinterpret_cast<const float2*>(scratch.copied + s * elements)[i];
                const float l = scratch.record_sums[s][head];
                o.x = is_there ? merge({0, f.x, f.y}, o.x, x.x) : o.x;
                o.y = is_there ? merge({0, f.x, f.y}, o.y, x.y) : o.y;
                sum = is_there ? merge({0, f.x, f.y}, sum, l) : sum;
            };
            int s = 0;
#pragma unroll 1
            for (; s + 8 <= n; s += 8) {
#pragma unroll
                for (int j = 0; j < 8; ++j) add(s + j, true);
            }
            if (s < n) {
#pragma unroll
                for (int j = 0; j < 7; ++j) add(min(s + j, n - 1), s + j < n);
            }
            if (from + n < segments) {
                scratch.outputs[i] = o;
                if (own == 0 || i == 0) scratch.sums[parity ^ 1][head] = sum;
                continue;
            }
            if constexpr (HAS_SINKS) {
                const MergeFactors merging = {0, factors_of_sinks[head].x, factors_of_sinks[head].y};
                o = make_float2(merge(merging, o.x, 0.0f), merge(merging, o.y, 0.0f)), sum = merge(merging, sum, 1.0f);
            }
            const float merged[4] = {o.x, 0.0f, o.y, 0.0f}, sums[2] = {sum, 1.0f};
            __half y[4];
            attention_outputs(merged, sums, y);
            const int element = records.rank * WIDTH + own;
            if (element < head_dim) out[head * head_dim + element] = y[0];
            if (element + 1 < head_dim) out[head * head_dim + element + 1] = y[2];
        }
    }
    sync();
}

// fp16(x * sigmoid(gate)), as gate_rows computes it.
__device__ __forceinline__ __half gated(__half x, __half gate) {
    const float open = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-__half2float(gate))));
    return __float2half_rn(__fmul_rn(__half2float(x), open));
}

}  // namespace bminf
