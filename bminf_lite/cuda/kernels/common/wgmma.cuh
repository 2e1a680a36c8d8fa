// The asynchronous tensor cores of compute capability 9.0: what every kernel that uses them needs.
//
// Operands lie in shared memory in rows of 128 bytes whose 16-byte pieces are exchanged by the row's lowest three bits
// ("128-byte swizzle"), eight rows after eight rows. A group of four warps issues a product together; each of its
// threads holds a share of the 64 rows of sums.
#pragma once

namespace bminf {

constexpr int WARPGROUP = 128;  // threads that issue a product together

// Makes what this thread wrote to shared memory visible to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The operand of a product that starts at a shared address: `stride` bytes between columns of 64, which only an operand
// whose columns are the outer axis has several of; 1024 bytes between groups of eight rows.
__device__ __forceinline__ unsigned long long make_smem_desc(unsigned address, int stride) {
    const unsigned low = (static_cast<unsigned>(stride) >> 4 << 16) | ((address & 0x3ffff) >> 4);
    return (1ull << 62) | (64ull << 32) | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most N groups of products are under way.
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accesses of an accumulator across this point.
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(c[n][j])::"memory");
}

template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(int (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(c[n][j])::"memory");
}

// The registers of an accumulator, as an instruction lists them.
#define UP_TO_31                                                                                                     \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define UP_TO_63                                                                                        \
    UP_TO_31                                                                                            \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"
#define UP_TO_127                                                                                        \
    UP_TO_63                                                                                             \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,"  \
    "%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109," \
    "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

}  // namespace bminf
