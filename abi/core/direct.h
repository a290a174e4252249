/* Kernels without a host object: the library loads them and launches them itself. */
#ifndef KSEAL_CORE_DIRECT_H
#define KSEAL_CORE_DIRECT_H

#include "variant.h"

/* Has the driver load `image`. On failure *library is unchanged. */
kseal_status kseal_direct_init(const void *image, CUlibrary *library);

/* Looks up the variant's kernels, in order, and lets each have its dynamic shared memory on `device`. */
kseal_status kseal_direct_load(const struct kseal_variant *variant, CUlibrary library, int device, CUkernel *kernels);

#endif
