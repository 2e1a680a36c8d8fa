// The preparation of latent attention by itself (latent_rows.cuh): block (t, part) has a part of token t.
#include "attention/latent_rows.cuh"

using namespace bminf;

template <class CACHE>
__global__ void __launch_bounds__(LATENT_ROWS_THREADS) latent_rows(
    const float* kv, long long kv_pitch, const float* norm_weight, int weight_pitch, float eps,
    const float* frequencies, float rope_scale, const __half* q, long long q_pitch, int heads, int nope_dim,
    int rope_dim, int rank, int depth, float beta, int original, const int* cu_seqlens, const int* context_lens,
    const int* block_tables, int table_pitch, int sequences, CACHE* cache, __half* scales, __half* queries,
    float* factors) {
    __shared__ LatentRowsScratch<LATENT_ROWS_THREADS> scratch;
    launch_dependent_grids();
    const LatentRowsParams<CACHE> p = {
        kv,           kv_pitch,    norm_weight, weight_pitch, eps,    frequencies, rope_scale, q,          q_pitch,
        heads,        nope_dim,    rope_dim,    rank,         depth,  beta,        original,   cu_seqlens, context_lens,
        block_tables, table_pitch, sequences,   cache,        scales, queries,     factors};
    LatentRowPart<LATENT_ROWS_THREADS, CACHE> part(p, blockIdx.x, blockIdx.y, scratch);
    wait_on_dependent_grids();
    part.store();
}
