#define _GNU_SOURCE
#include "emulator.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <ucontext.h>

#define WARP 32
#define STACK_BYTES (32 * 1024)

/* Where fibers wait for one another: the last to arrive opens it. */
struct gate {
    unsigned arrived, opened;
};

struct warp {
    struct gate gate;
    unsigned values[WARP];
};

struct fiber {
    ucontext_t context;
    bool done;
};

struct block {
    unsigned number, blocks, threads, current;
    void (*kernel)(void *);
    void *argument;
    unsigned char *smem, *stacks;
    struct fiber *fibers;
    struct warp *warps;
    struct gate gate;
    ucontext_t scheduler;
};

static _Thread_local struct block *self;

unsigned emu_thread(void) { return self->current; }
unsigned emu_block(void) { return self->number; }
unsigned emu_blocks(void) { return self->blocks; }
unsigned char *emu_smem(void) { return self->smem; }

static void leave(void) { swapcontext(&self->fibers[self->current].context, &self->scheduler); }

void emu_yield(void) {
    sched_yield();
    leave();
}

void emu_rest(void) { usleep(2000); }

static void pass(struct gate *gate, unsigned count) {
    unsigned before = gate->opened;
    if (++gate->arrived == count) {
        gate->arrived = 0;
        gate->opened++;
    }
    while (gate->opened == before)
        leave();
}

void emu_sync(void) { pass(&self->gate, self->threads); }

unsigned emu_shuffle(unsigned value, int from) {
    struct warp *warp = &self->warps[self->current / WARP];
    unsigned lane = self->current % WARP;
    warp->values[lane] = value;
    pass(&warp->gate, WARP);
    unsigned found = from >= 0 && from < WARP ? warp->values[from] : value;
    pass(&warp->gate, WARP);
    return found;
}

static void enter(void) {
    self->kernel(self->argument);
    self->fibers[self->current].done = true;
    leave();
}

static void *run_block(void *given) {
    struct block *block = self = given;
    block->fibers = calloc(block->threads, sizeof *block->fibers);
    block->warps = calloc((block->threads + WARP - 1) / WARP, sizeof *block->warps);
    block->stacks = malloc((size_t)block->threads * STACK_BYTES);
    for (unsigned i = 0; i < block->threads; i++) {
        ucontext_t *context = &block->fibers[i].context;
        getcontext(context);
        context->uc_stack.ss_sp = block->stacks + (size_t)i * STACK_BYTES;
        context->uc_stack.ss_size = STACK_BYTES;
        makecontext(context, enter, 0);
    }
    for (unsigned alive = block->threads; alive > 0;) {
        alive = 0;
        /* Odd blocks run the last thread first: no order of threads may matter. */
        for (unsigned i = 0; i < block->threads; i++) {
            block->current = block->number % 2 ? block->threads - 1 - i : i;
            if (block->fibers[block->current].done)
                continue;
            swapcontext(&block->scheduler, &block->fibers[block->current].context);
            alive += !block->fibers[block->current].done;
        }
    }
    free(block->stacks);
    free(block->warps);
    free(block->fibers);
    return NULL;
}

void emu_launch(unsigned blocks, unsigned threads, unsigned long smem, void (*kernel)(void *), void *argument) {
    struct block *made = calloc(blocks, sizeof *made);
    pthread_t *running = calloc(blocks, sizeof *running);
    for (unsigned i = 0; i < blocks; i++) {
        made[i] = (struct block){
            .number = i, .blocks = blocks, .threads = threads, .kernel = kernel, .argument = argument};
        made[i].smem = aligned_alloc(128, (smem + 127) / 128 * 128);
        memset(made[i].smem, 0xA5, smem);
        pthread_create(&running[i], NULL, run_block, &made[i]);
    }
    for (unsigned i = 0; i < blocks; i++) {
        pthread_join(running[i], NULL);
        free(made[i].smem);
    }
    free(running);
    free(made);
}
