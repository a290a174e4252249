/* The variants compiled into this library, and what of them is loaded in this process. */
#ifndef KSEAL_CORE_VARIANT_H
#define KSEAL_CORE_VARIANT_H

#include <pthread.h>

#include "driver.h"

#define KSEAL_MAX_DEVICES 64
#define KSEAL_MAX_KERNELS 8 /* of one variant */

/*
 * A CuTe host object keeps its kernels in globals, so loading is per variant and process, whatever number of handles there
 * are. Guarded by the mutex; a run does not read it (a handle has its own copy of the kernels).
 */
struct kseal_variant_state {
    pthread_mutex_t mutex;
    uint32_t handles;
    CUlibrary library;
    CUkernel kernels[KSEAL_MAX_KERNELS];
    uint64_t ready;    /* bit d: loaded on device d */
    uint64_t retained; /* bit d: holds the primary context of device d */
};
#define KSEAL_VARIANT_STATE_INIT {.mutex = PTHREAD_MUTEX_INITIALIZER}

/* One kernel of a variant's image. */
struct kseal_kernel {
    const char *entry;
    uint32_t registers;
    uint32_t spill_bytes;
    uint32_t static_smem;
    uint32_t dynamic_smem;
};

struct kseal_variant {
    const char *op;
    const char *name;
    const char *class_name;
    uint32_t class_index; /* into the op's classes */
    const uint32_t *axes; /* in the order of the op's axes */
    const char *axes_text;
    const char *file;
    uint64_t size;
    const char *sha256;
    uint32_t evidence;
    const struct kseal_kernel *kernels; /* the first is the one a kseal_variant_info describes */
    uint32_t kernel_count;
    /* The CuTe host object's functions, or null where the library launches the kernel itself. */
    void (*init)(void **args);
    void (*load)(void **args);
    void (*call)(void **args, int32_t count);
    struct kseal_variant_state *state;
};

/* Written for each library by kernseal.abi.library. The table ends with a row whose op is null. */
extern const struct kseal_variant kseal_variants[];
extern const uint32_t kseal_variant_total;
extern const char kseal_library_sm[];     /* what the images run on */
extern const char kseal_library_target[]; /* what they were meant for: differs when retargeted */
extern const uint32_t kseal_library_retargeted;
extern const uint32_t kseal_library_cc[2]; /* compute capability of kseal_library_sm */

/*
 * Reads and checks the image below `dirfd`, and loads it on `device` where it is not yet. On success counts one handle and
 * gives its kernels, which stay valid until that handle is released.
 */
kseal_status kseal_variant_acquire(const struct kseal_variant *variant, int dirfd, int device, CUkernel *kernels);

/* Takes one handle back; the last one unloads. */
kseal_status kseal_variant_release(const struct kseal_variant *variant);

#endif
