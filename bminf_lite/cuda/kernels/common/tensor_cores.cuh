// mma.sync of fp16 and of int8 matrices from compute capability 7.5 on, and the loads of fp16 fragments.
//
// The fragments of lane t, with r = t / 4 and q = t % 4 * 2; each register holds two neighbouring fp16 elements:
//   a [16, 16], the left operand:  {(r, q), (r + 8, q), (r, q + 8), (r + 8, q + 8)}, each with the next column
//   b [16, 8], the right operand:  {(q, r), (q + 8, r)}, each with the next row
//   c [16, 8], the fp32 result:    {(r, q), (r, q + 1), (r + 8, q), (r + 8, q + 1)}
#pragma once
#include "common/common.cuh"

namespace bminf {

// c += a @ b
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const unsigned b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}

// The same of int8, in int32: a [16, 32] {(r, 2 q), (r + 8, 2 q), (r, 2 q + 16), (r + 8, 2 q + 16)} and b [32, 8] {(2 q,
// r), (2 q + 16, r)}, four neighbouring elements of k in a register; c as above.
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const int (&a)[4], int b0, int b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int b[2] = {b0, b1};
#pragma unroll
    for (int half = 0; half < 2; ++half)  // of k
#pragma unroll
        for (int m = 0; m < 2; ++m)
            asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                         : "+r"(c[2 * m]), "+r"(c[2 * m + 1])
                         : "r"(a[2 * half + m]), "r"(b[half]));
#endif
}

// Loads four [8, 8] matrices. Lane t gives the shared address of row t % 8 of matrix t / 8, and gets of each matrix the
// elements (t / 4, t % 4 * 2) and its right neighbour.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

}  // namespace bminf
