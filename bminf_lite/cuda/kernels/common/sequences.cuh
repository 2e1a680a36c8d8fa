// The sequences of a step, and which of its tokens belong to one text.
#pragma once

namespace bminf {

// cu_seqlens [count + 1], context_lens [count] and their slots, slots_pitch apart.
struct Sequences {
    const int* cu_seqlens;
    const int* context_lens;
    const int* slots;
    long long slots_pitch;
    int count;

    // The sequence of a token in front of cu_seqlens[count], by bisection.
    __device__ __forceinline__ int of(int token) const {
        int sequence = 0, last = count;
        while (last - sequence > 1) {
            const int middle = (sequence + last) / 2;
            if (cu_seqlens[middle] <= token)
                sequence = middle;
            else
                last = middle;
        }
        return sequence;
    }

    __device__ __forceinline__ int slot(int sequence) const { return slots[sequence * slots_pitch]; }

    // Whether a sequence is a draft: it goes on with the text of the one before it, which has the same slot; slot 0 is
    // that of padding.
    __device__ __forceinline__ bool is_draft(int sequence, bool has_drafts) const {
        if (!has_drafts || sequence == 0) return false;
        const int own = slot(sequence);
        return own != 0 && slot(sequence - 1) == own;
    }

    // The sequence with which the text of `sequence` begins in this step.
    __device__ __forceinline__ int first_of_text(int sequence, bool has_drafts) const {
        while (is_draft(sequence, has_drafts)) --sequence;
        return sequence;
    }

    // The sequence behind the text of `sequence`.
    __device__ __forceinline__ int end_of_text(int sequence, bool has_drafts) const {
        do ++sequence;
        while (sequence < count && is_draft(sequence, has_drafts));
        return sequence;
    }

    // The position of a token of a sequence.
    __device__ __forceinline__ int position(int sequence, int token) const {
        return context_lens[sequence] + token - cu_seqlens[sequence];
    }
};

}  // namespace bminf
