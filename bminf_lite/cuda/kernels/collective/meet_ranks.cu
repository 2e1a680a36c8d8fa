// A meeting of the GPUs of a host: behind it, all that any of them has done before it is complete, and can be read.
#include "collective/waiting.cuh"
#include "common/common.cuh"

using namespace bminf;

// Waits until all ranks are here. The flags of meetings in turn are two [ranks] words in each rank's memory: a rank
// that is one meeting ahead cannot be two ahead. count: the number of this meeting, from 1 on.
__global__ void __launch_bounds__(32) meet_ranks(
    const unsigned long long* bases, unsigned* count, unsigned* calls, int* failure, int rank, int ranks,
    unsigned long long patience) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const unsigned meeting = *static_cast<volatile unsigned*>(count), first = meeting % 2 * ranks;
    __syncwarp();
    if (threadIdx.x == 0) *count = meeting == 0xffffffffu ? 2 : meeting + 1;
    Patience waiting = {calls, failure, patience};
    __threadfence_system();
    for (int peer = threadIdx.x; peer < ranks; peer += WARP) {
        if (peer == rank) continue;
        store_release(reinterpret_cast<unsigned*>(bases[peer]) + first + rank, meeting);
        const unsigned* flag = reinterpret_cast<const unsigned*>(bases[rank]) + first + peer;
        while (load_acquire(flag) != meeting && waiting.goes_on(peer));
    }
    __threadfence_system();
}
