// Products of small fp16 matrices on the tensor cores, from compute capability 7.5 on.
//
// Of a [16, 16] left operand a thread of a warp holds, of the rows lane / 4 and that plus 8, the columns lane % 4 * 2
// and one more, and those plus 8: {row, first}, {row + 8, first}, {row, first + 8}, {row + 8, first + 8}. Of a [16, 8]
// right operand it holds rows like these columns, of column lane / 4; of a [16, 8] result, rows as of the left operand
// and the columns lane % 4 * 2 and one more.
#pragma once
#include "common/common.cuh"

namespace bminf {

// c += a @ b.
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

__device__ __forceinline__ unsigned pack(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// Four [8, 8] matrices from shared memory, of which each thread gives the address of one row, lane % 8 of matrix lane
// / 8. It gets two elements of row lane / 4 of each; transposed, of that column.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&x)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

// A thread's two elements of a column of an [8, 8] matrix, from its two elements of a row.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned row) {
    unsigned column;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
    return column;
}

}  // namespace bminf
