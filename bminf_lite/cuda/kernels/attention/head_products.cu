// Products of each head's part of some rows with the head's own matrix (head_products.cuh). The grid is (blocks of
// tokens, blocks of columns, heads). Dynamic shared memory: a HeadProductsScratch.
#include "attention/head_products.cuh"

using namespace bminf;

template <int TOKENS, int STAGES, bool BY_INPUT>
__global__ void __launch_bounds__(THREADS) head_products(
    const __half* x, long long x_pitch, int x_head, int aligned, const __half* w, int w_pitch, int w_rows, int k, int n,
    const float* factors, __half* out, long long out_pitch, int out_head, int tokens) {
    extern __shared__ __align__(128) char shared[];
    launch_dependent_grids();
    multiply_head<TOKENS, STAGES, BY_INPUT>(
        *reinterpret_cast<HeadProductsScratch<TOKENS, STAGES>*>(shared), blockIdx.x, blockIdx.y, blockIdx.z, x, x_pitch,
        x_head, aligned, w, w_pitch, w_rows, k, n, factors, out, out_pitch, out_head, tokens);
}
