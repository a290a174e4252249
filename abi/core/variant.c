#include "variant.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cute.h"
#include "direct.h"
#include "image.h"

static uint64_t bit(int device) { return (uint64_t)1 << device; }

/* Has the driver put the kernels into the current context now, so that no run has to under graph capture. */
static kseal_status load_functions(const struct kseal_variant *variant) {
    for (uint32_t i = 0; i < variant->kernel_count; i++) {
        CUfunction function;
        CUresult code = kseal_driver.cuKernelGetFunction(&function, variant->state->kernels[i]);
        if (code != 0)
            return kseal_driver_fail("cuKernelGetFunction", code);
    }
    return KSEAL_OK;
}

/* The same for a device that is not current: in its primary context, which is then kept until unload. */
static kseal_status load_functions_elsewhere(const struct kseal_variant *variant, int device) {
    CUcontext context, popped;
    CUresult code = kseal_driver.cuDevicePrimaryCtxRetain(&context, device);
    if (code != 0)
        return kseal_driver_fail("cuDevicePrimaryCtxRetain", code);
    code = kseal_driver.cuCtxPushCurrent_v2(context);
    kseal_status status = code == 0 ? load_functions(variant) : kseal_driver_fail("cuCtxPushCurrent", code);
    if (code == 0)
        kseal_driver.cuCtxPopCurrent_v2(&popped);
    if (status != KSEAL_OK)
        kseal_driver.cuDevicePrimaryCtxRelease_v2(device);
    return status;
}

static kseal_status load_on_device(const struct kseal_variant *variant, int device) {
    struct kseal_variant_state *state = variant->state;
    kseal_status status = variant->load != NULL
                              ? kseal_cute_load(variant, state->library, device, state->kernels)
                              : kseal_direct_load(variant, state->library, device, state->kernels);
    if (status != KSEAL_OK)
        return status;
    CUdevice current;
    bool here = kseal_driver_current_device(&current) == 0 && current == device;
    status = here ? load_functions(variant) : load_functions_elsewhere(variant, device);
    if (status != KSEAL_OK)
        return status;
    state->ready |= bit(device);
    if (!here)
        state->retained |= bit(device);
    return KSEAL_OK;
}

/* Whatever the driver says, nothing is loaded afterwards. */
static CUresult unload(struct kseal_variant_state *state) {
    CUresult code = state->library != NULL ? kseal_driver.cuLibraryUnload(state->library) : 0;
    for (int device = 0; device < KSEAL_MAX_DEVICES; device++)
        if (state->retained & bit(device))
            kseal_driver.cuDevicePrimaryCtxRelease_v2(device);
    state->library = NULL;
    memset(state->kernels, 0, sizeof state->kernels);
    state->ready = 0;
    state->retained = 0;
    return code;
}

static kseal_status load_locked(const struct kseal_variant *variant, const void *image, int device) {
    struct kseal_variant_state *state = variant->state;
    kseal_status status = KSEAL_OK;
    if (state->library == NULL)
        status = variant->init != NULL ? kseal_cute_init(variant, image, &state->library)
                                       : kseal_direct_init(image, &state->library);
    if (status == KSEAL_OK && !(state->ready & bit(device)))
        status = load_on_device(variant, device);
    if (status == KSEAL_OK)
        state->handles++;
    else if (state->handles == 0)
        unload(state);
    return status;
}

kseal_status kseal_variant_acquire(const struct kseal_variant *variant, int dirfd, int device, CUkernel *kernels) {
    void *image;
    /* Also when it is loaded: whether a bundle passes must not depend on what ran before. */
    kseal_status status = kseal_image_read(dirfd, variant->file, variant->size, variant->sha256, &image);
    if (status != KSEAL_OK)
        return status;
    pthread_mutex_lock(&variant->state->mutex);
    status = load_locked(variant, image, device);
    if (status == KSEAL_OK)
        memcpy(kernels, variant->state->kernels, sizeof variant->state->kernels);
    pthread_mutex_unlock(&variant->state->mutex);
    free(image);
    return status;
}

kseal_status kseal_variant_release(const struct kseal_variant *variant) {
    CUresult code = 0;
    pthread_mutex_lock(&variant->state->mutex);
    if (--variant->state->handles == 0)
        code = unload(variant->state);
    pthread_mutex_unlock(&variant->state->mutex);
    return code == 0 ? KSEAL_OK : kseal_driver_fail("cuLibraryUnload", code);
}
