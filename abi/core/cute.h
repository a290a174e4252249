/* Calls into CuTe host objects, whose _cuda* imports are satisfied here from the driver. */
#ifndef KSEAL_CORE_CUTE_H
#define KSEAL_CORE_CUTE_H

#include "variant.h"

/* Has the object load `image` (its own embedded copy is never used). On failure *library is unchanged or null. */
kseal_status kseal_cute_init(const struct kseal_variant *variant, const void *image, CUlibrary *library);

/* Has the object look up its kernels and set their attributes for `device`; `kernels` gets them in the variant's order. */
kseal_status kseal_cute_load(const struct kseal_variant *variant, CUlibrary library, int device, CUkernel *kernels);

/* Calls its host function; see kseal_handle_launch. */
kseal_status kseal_cute_call(const struct kseal_variant *variant, void **args, int32_t count);

#endif
