// The work of decode attention: which blocks compute which segments, and the merge of the segments' records.
//
// An item is one segment of the context of one pair (sequence, group of query heads). Items are in order of sequence,
// group and segment. Either a unit (1, 2, 4 or 8 blocks of a cluster) computes one item, which its index names, or
// every block finds a range of items from the lengths of the contexts. The distribution changes no bit of a result.
#pragma once
#include "attention/softmax.cuh"
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "constants/decode.cuh"

namespace bminf {

constexpr int COST_KEYS = 128;  // an item costs 1, and 1 for so many keys

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

constexpr int MERGED = 2 * WARP;  // records that are merged at a time, at most

// Shared memory of BYTES bytes for the merge of records: for each of them and each head the factors of what is merged
// already and of the record; what is merged already; the outputs of the records.
template <int WIDTH, int BYTES>
struct MergeScratch {
    static constexpr int COPIED = (BYTES - MERGED * HEADS * 8 - HEADS * WIDTH * 4 - HEADS * 4) / 4;
    static_assert(COPIED >= HEADS * WIDTH, "one record fits");
    float2 factors[MERGED][HEADS];
    float2 outputs[HEADS * WIDTH / 2];
    float sums[HEADS];
    alignas(16) float copied[COPIED];
};

// The factors of n records of `head` from the record `from` on, and their merged sum of weights `sum`; `top` and `sum`
// are those of the records before, -INF_F and 0 for none. Called by one warp. A lane has a record, because all but
// `sum` is a prefix maximum. Lanes without a record change nothing.
template <int D, int WIDTH>
__device__ __forceinline__ void find_factors(
    const Records<D, WIDTH>& records, int from, int n, int head, float& top, float& sum,
    float2 (&factors)[MERGED][HEADS]) {
    const int lane = threadIdx.x % WARP;
    const auto fetch = [&](int s) {  // the largest score and the sum of weights
        return s < n ? __ldcg(records.sums(from + s, head)) : make_float2(-INF_F, 0.0f);
    };
    float2 next = fetch(lane);
#pragma unroll 1
    for (int s = lane; s - lane < n; s += WARP) {
        const float2 x = next;
        next = fetch(s + WARP);
        float highest = fmaxf(top, x.x);  // up to this record
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) highest = fmaxf(highest, __shfl_up_sync(FULL, highest, d));
        const float before = __shfl_up_sync(FULL, highest, 1);
        const MergeFactors merging = merge_factors(lane ? before : top, x.x);
        factors[s][head] = make_float2(merging.left, merging.right);
        top = __shfl_sync(FULL, highest, WARP - 1);
#pragma unroll 4
        for (int j = 0; j < min(WARP, (n - s + lane + 3) / 4 * 4); ++j) {
            const float left = __shfl_sync(FULL, merging.left, j), right = __shfl_sync(FULL, merging.right, j);
            sum = merge({0, left, right}, sum, __shfl_sync(FULL, x.y, j));
        }
    }
}

// Adds to a counter; what all blocks wrote before they added to it is visible afterwards.
__device__ __forceinline__ int atomic_add_acq_rel(int* counter, int x) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
    return before;
}

// Counts the `written` records of a pair that has `segments`. The last block to arrive merges all records from the left
// and writes the outputs of `count` heads to `out`, up to element head_dim of each. Called by THREADS threads, of which
// `sync` is the barrier. counter: 0 before and after. Few blocks run this code, so its instructions are in no cache: it
// is kept short.
template <int THREADS, int D, int WIDTH, int BYTES, class Sync>
__device__ __forceinline__ void merge_records(
    Sync sync, const Records<D, WIDTH>& records, int first, int written, int segments, int* counter, __half* out,
    int count, int head_dim, MergeScratch<WIDTH, BYTES>& scratch) {
    static_assert(THREADS >= HEADS * WARP, "a warp for each head");
    __shared__ bool is_last;
    sync();
    if (threadIdx.x == 0) {
        is_last = atomic_add_acq_rel(counter, written) + written == segments;
        if (is_last) *counter = 0;
    }
    sync();
    if (!is_last) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int row = count * WIDTH, pairs = count * (WIDTH / 2), most = min(MERGED, scratch.COPIED / row);
    float top = -INF_F, sum = 0;  // of the head of this warp
#pragma unroll 1
    for (int from = 0; from < segments; from += most) {
        const int n = min(most, segments - from);
        if (from > 0) sync();
#pragma unroll 1
        for (int s = warp; s < n; s += THREADS / WARP)
#pragma unroll 1
            for (int i = lane * 4; i < row; i += WARP * 4)
                cp_async_16(&scratch.copied[s * row + i], records.outputs(first + from + s, 0) + i);
        if (warp < count) {
            find_factors(records, first + from, n, warp, top, sum, scratch.factors);
            if (lane == 0) scratch.sums[warp] = sum;
        }
        cp_async_wait_all();
        sync();
#pragma unroll 1
        for (int i = threadIdx.x; i < pairs; i += THREADS) {
            const int head = i / (WIDTH / 2), element = records.rank * WIDTH + i % (WIDTH / 2) * 2;
            const float2* const copied = reinterpret_cast<const float2*>(scratch.copied) + i;
            float2 o = from == 0 ? copied[0] : scratch.outputs[i];  // of the records before
#pragma unroll 1
            for (int s = from == 0; s < n; s += 4) {
#pragma unroll
                for (int j = s; j < s + 4; ++j) {
                    if (j >= n) break;
                    const float2 x = copied[j * pairs], f = scratch.factors[j][head];
                    o.x = merge({0, f.x, f.y}, o.x, x.x), o.y = merge({0, f.x, f.y}, o.y, x.y);
                }
            }
            scratch.outputs[i] = o;
            if (from + n < segments) continue;
            if (element < head_dim) out[head * head_dim + element] = attention_output(o.x, scratch.sums[head]);
            if (element + 1 < head_dim) out[head * head_dim + element + 1] = attention_output(o.y, scratch.sums[head]);
        }
    }
    sync();
}

}  // namespace bminf
