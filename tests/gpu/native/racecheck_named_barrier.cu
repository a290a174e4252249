// Whether compute-sanitizer's racecheck follows __syncthreads() after a barrier that only some warps of a block wait at.
//
//     nvcc -arch=sm_90a -o racecheck_named_barrier racecheck_named_barrier.cu
//     compute-sanitizer --tool racecheck ./racecheck_named_barrier         # no hazard
//     compute-sanitizer --tool racecheck ./racecheck_named_barrier named   # hazards, of the same write and the same reads
//
// One thread of 1,024 writes a word of shared memory, all wait at __syncthreads(), all read it. With `named` the first 256 wait for
// one another beforehand, at barrier 1: this orders more, and cannot make a race. topk_varlen does so. Prints whether every thread
// read what was written.

#include <cstdio>
#include <cstring>

constexpr int THREADS = 1024, SOME = 256, WRITER = 61, WORD = 7;

__global__ void kernel(bool named, int *read) {
    __shared__ int word;
    if (named && threadIdx.x < SOME)
        asm volatile("bar.sync 1, 256;" ::: "memory");
    if (threadIdx.x == WRITER)
        word = WORD;
    __syncthreads();
    read[threadIdx.x] = word;
}

int main(int count, char **given) {
    const bool named = count > 1 && std::strcmp(given[1], "named") == 0;
    int *read = nullptr, found[THREADS] = {}, right = 0;
    cudaError_t error = cudaMalloc(&read, sizeof found);
    if (error == cudaSuccess) {
        kernel<<<1, THREADS>>>(named, read);
        error = cudaMemcpy(found, read, sizeof found, cudaMemcpyDeviceToHost);
    }
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
        return 1;
    }
    for (const int value : found)
        right += value == WORD;
    std::printf("%s: %d of %d threads read what was written\n", named ? "named" : "plain", right, THREADS);
    return right == THREADS ? 0 : 1;
}
