// wgmma, the asynchronous tensor core instructions of compute capability 9.0.
//
// A warpgroup (four warps) issues an instruction together. The operands in shared memory have rows of 128 bytes with
// the 128-byte swizzle: the index of each 16-byte piece within its row is XORed with the lowest three bits of the row.
// The accumulator c[N / 8][4] of [64, N] results lies in registers: thread t of warp w holds of columns 8 n to 8 n + 7
// the elements {(r, q), (r, q + 1), (r + 8, q), (r + 8, q + 1)} as c[n], with r = 16 w + t / 4 and q = 8 n + t % 4 * 2.
#pragma once

namespace bminf {

constexpr int WARPGROUP = 128;  // threads

// The matrix descriptor of an operand at a shared address: 128-byte swizzle, 1024 bytes between groups of eight rows.
// `stride` is the distance in bytes between blocks of 64 columns; it matters only for an operand that is read along
// its columns (transposed) and spans several such blocks.
__device__ __forceinline__ unsigned long long make_smem_desc(unsigned address, int stride) {
    const unsigned low = (static_cast<unsigned>(stride) >> 4 << 16) | ((address & 0x3ffff) >> 4);
    return (1ull << 62) | (64ull << 32) | low;
}

// The descriptor of what lies `offset` bytes behind, a multiple of 16: one addition, where make_smem_desc takes four
// instructions that wait for each other.
__device__ __forceinline__ unsigned long long advance_smem_desc(unsigned long long desc, int offset) {
    const unsigned low = static_cast<unsigned>(desc) + (offset >> 4);
    return (desc >> 32 << 32) | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N groups are pending.
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accesses to an accumulator across this point.
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

// ---- the instructions --------------------------------------------------------------------------------------------

// The registers of an accumulator as asm operands, from c[i] on, and their numbers in the text of an instruction.
#define ACC_1(t, i) t(c[i][0]), t(c[i][1]), t(c[i][2]), t(c[i][3])
#define ACC_2(t, i) ACC_1(t, i), ACC_1(t, i + 1)
#define ACC_4(t, i) ACC_2(t, i), ACC_2(t, i + 2)
#define ACC_6(t, i) ACC_4(t, i), ACC_2(t, i + 4)
#define ACC_8(t, i) ACC_4(t, i), ACC_4(t, i + 4)
#define ACC_12(t, i) ACC_8(t, i), ACC_4(t, i + 8)
#define ACC_16(t, i) ACC_8(t, i), ACC_8(t, i + 8)
#define ACC_20(t, i) ACC_16(t, i), ACC_4(t, i + 16)
#define ACC_24(t, i) ACC_16(t, i), ACC_8(t, i + 16)
#define ACC_28(t, i) ACC_24(t, i), ACC_4(t, i + 24)
#define ACC_32(t, i) ACC_16(t, i), ACC_16(t, i + 16)
#define UP_TO_3 "%0,%1,%2,%3"
#define UP_TO_7 UP_TO_3 ",%4,%5,%6,%7"
#define UP_TO_15 UP_TO_7 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define UP_TO_23 UP_TO_15 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define UP_TO_31 UP_TO_23 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define UP_TO_47 UP_TO_31 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define UP_TO_63 UP_TO_47 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define UP_TO_79 UP_TO_63 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define UP_TO_95 UP_TO_79 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define UP_TO_111 UP_TO_95 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define UP_TO_127 UP_TO_111 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// wgmma(c, a, b, add): c = a @ b.T + (add ? c : 0) of int8, a [64, 32] and b [N, 32] in shared memory.
#define DEFINE_WGMMA_S8(N, REGISTERS, ACCUMULATOR, A, B, ADD)                                                         \
    __device__ __forceinline__ void wgmma(int (&c)[N / 8][4], unsigned long long a, unsigned long long b, bool add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                                      \
                     ", 0;\n"                                                                                         \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGISTERS "}, " A ", " B ", add;\n}"    \
                     : ACCUMULATOR("+r", 0)                                                                           \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                   \
    }
DEFINE_WGMMA_S8(8, UP_TO_3, ACC_1, "%4", "%5", "%6")
DEFINE_WGMMA_S8(16, UP_TO_7, ACC_2, "%8", "%9", "%10")
DEFINE_WGMMA_S8(32, UP_TO_15, ACC_4, "%16", "%17", "%18")
DEFINE_WGMMA_S8(48, UP_TO_23, ACC_6, "%24", "%25", "%26")
DEFINE_WGMMA_S8(64, UP_TO_31, ACC_8, "%32", "%33", "%34")
DEFINE_WGMMA_S8(96, UP_TO_47, ACC_12, "%48", "%49", "%50")
DEFINE_WGMMA_S8(128, UP_TO_63, ACC_16, "%64", "%65", "%66")
DEFINE_WGMMA_S8(160, UP_TO_79, ACC_20, "%80", "%81", "%82")
DEFINE_WGMMA_S8(192, UP_TO_95, ACC_24, "%96", "%97", "%98")
DEFINE_WGMMA_S8(224, UP_TO_111, ACC_28, "%112", "%113", "%114")
DEFINE_WGMMA_S8(256, UP_TO_127, ACC_32, "%128", "%129", "%130")

// wgmma<ADD>(c, a, b): c = a @ b.T + (ADD ? c : 0) of fp16, a [64, 16] and b [N, 16] in shared memory.
#define DEFINE_WGMMA_F16(N, REGISTERS, ACCUMULATOR, A, B, ADD_)                                               \
    template <bool ADD>                                                                                       \
    __device__ __forceinline__ void wgmma(float (&c)[N / 8][4], unsigned long long a, unsigned long long b) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD_                                             \
                     ", 0;\n"                                                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, " A ", " B      \
                     ", add, 1, 1, 0, 0;\n}"                                                                  \
                     : ACCUMULATOR("+f", 0)                                                                   \
                     : "l"(a), "l"(b), "n"(ADD));                                                             \
    }
DEFINE_WGMMA_F16(64, UP_TO_31, ACC_8, "%32", "%33", "%34")
DEFINE_WGMMA_F16(128, UP_TO_63, ACC_16, "%64", "%65", "%66")

// wgmma(c, a, b, add): c = a @ b + (add ? c : 0) of fp16, a [64, 16] in registers and b [16, N] in shared memory (read
// along its columns).
#define DEFINE_WGMMA_F16_REGISTERS(N, REGISTERS, ACCUMULATOR, A, B, ADD)                                   \
    __device__ __forceinline__ void wgmma(                                                                 \
        float (&c)[N / 8][4], const unsigned (&a)[4], unsigned long long b, bool add) {                    \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                           \
                     ", 0;\n"                                                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {" A "}, " B \
                     ", add, 1, 1, 1;\n}"                                                                  \
                     : ACCUMULATOR("+f", 0)                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));    \
    }
DEFINE_WGMMA_F16_REGISTERS(64, UP_TO_31, ACC_8, "%32,%33,%34,%35", "%36", "%37")
DEFINE_WGMMA_F16_REGISTERS(128, UP_TO_63, ACC_16, "%64,%65,%66,%67", "%68", "%69")

// wgmma_nn(c, a, b, add): c = a @ b + (add ? c : 0) of fp16, a [64, 16] and b [16, N] in shared memory (read along its
// columns).
#define DEFINE_WGMMA_NN(N, REGISTERS, ACCUMULATOR, A, B, ADD)                                            \
    __device__ __forceinline__ void wgmma_nn(                                                            \
        float (&c)[N / 8][4], unsigned long long a, unsigned long long b, bool add) {                    \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                         \
                     ", 0;\n"                                                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, " A ", " B \
                     ", add, 1, 1, 0, 1;\n}"                                                             \
                     : ACCUMULATOR("+f", 0)                                                              \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                      \
    }
DEFINE_WGMMA_NN(128, UP_TO_63, ACC_16, "%64", "%65", "%66")
DEFINE_WGMMA_NN(256, UP_TO_127, ACC_32, "%128", "%129", "%130")

// wgmma_nt(c, a, b, add): c = a @ b.T + (add ? c : 0) of fp16, a [64, 16] in registers or in shared memory, and b [N,
// 16] in shared memory.
#define DEFINE_WGMMA_NT(N, REGISTERS, ACCUMULATOR, A, B, ADD, A_SHARED, B_SHARED, ADD_SHARED)                          \
    __device__ __forceinline__ void wgmma_nt(                                                                          \
        float (&c)[N / 8][4], const unsigned (&a)[4], unsigned long long b, bool add) {                                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                                       \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {" A "}, " B             \
                     ", add, 1, 1, 0;\n}"                                                                              \
                     : ACCUMULATOR("+f", 0)                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                \
    }                                                                                                                  \
    __device__ __forceinline__ void wgmma_nt(                                                                          \
        float (&c)[N / 8][4], unsigned long long a, unsigned long long b, bool add) {                                  \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD_SHARED                                                \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, " A_SHARED ", " B_SHARED \
                     ", add, 1, 1, 0, 0;\n}"                                                                           \
                     : ACCUMULATOR("+f", 0)                                                                            \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
    }
DEFINE_WGMMA_NT(8, UP_TO_3, ACC_1, "%4,%5,%6,%7", "%8", "%9", "%4", "%5", "%6")
DEFINE_WGMMA_NT(16, UP_TO_7, ACC_2, "%8,%9,%10,%11", "%12", "%13", "%8", "%9", "%10")
DEFINE_WGMMA_NT(32, UP_TO_15, ACC_4, "%16,%17,%18,%19", "%20", "%21", "%16", "%17", "%18")
DEFINE_WGMMA_NT(64, UP_TO_31, ACC_8, "%32,%33,%34,%35", "%36", "%37", "%32", "%33", "%34")
DEFINE_WGMMA_NT(96, UP_TO_47, ACC_12, "%48,%49,%50,%51", "%52", "%53", "%48", "%49", "%50")
DEFINE_WGMMA_NT(128, UP_TO_63, ACC_16, "%64,%65,%66,%67", "%68", "%69", "%64", "%65", "%66")
DEFINE_WGMMA_NT(192, UP_TO_95, ACC_24, "%96,%97,%98,%99", "%100", "%101", "%96", "%97", "%98")
DEFINE_WGMMA_NT(256, UP_TO_127, ACC_32, "%128,%129,%130,%131", "%132", "%133", "%128", "%129", "%130")

}  // namespace bminf
