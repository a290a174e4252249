/* What a CUDA source needs to run on a CPU: a thread block is an operating-system thread, and its threads are fibers in it. */
#ifndef EMULATOR_H
#define EMULATOR_H

#ifdef __cplusplus
extern "C" {
#endif

/* Runs `kernel(argument)` as a grid of `blocks` blocks of `threads` threads with `smem` bytes of dynamic shared memory each. */
void emu_launch(unsigned blocks, unsigned threads, unsigned long smem, void (*kernel)(void *), void *argument);

/* Of the fiber that asks. */
unsigned emu_thread(void);
unsigned emu_block(void);
unsigned emu_blocks(void);
unsigned char *emu_smem(void);

/* Lets every other fiber of the block run, and other blocks. */
void emu_yield(void);

/* Lets other blocks go on for a while, and no other fiber of this one. */
void emu_rest(void);

/* __syncthreads. */
void emu_sync(void);

/* The value that lane `from` of the warp has at this call; its own, where there is no such lane. */
unsigned emu_shuffle(unsigned value, int from);

#ifdef __cplusplus
}
#endif
#endif
