#include "cute.h"

#include <stdatomic.h>
#include <string.h>

/*
 * What the object's callbacks need to know and tell. A run touches it after a failure only, because the first touch of
 * thread-local memory on a thread allocates: `failures` says whether there was any.
 */
static _Thread_local struct {
    const void *image;                   /* what _cudaLibraryLoadData is to load, during kseal_cute_init */
    const struct kseal_variant *variant; /* whose kernels _cudaLibraryGetKernel looks up, */
    CUkernel *kernels;                   /* and where they go, during kseal_cute_load */
    const char *call;                    /* the first driver call that failed, and its code */
    CUresult code;
} here;
static atomic_uint failures;

static CUresult checked(const char *call, CUresult code) {
    if (code == 0)
        return 0;
    if (here.code == 0) {
        here.call = call;
        here.code = code;
    }
    atomic_fetch_add(&failures, 1);
    return code;
}

/* Turns the object's result and what the callbacks saw into a status, and forgets what they saw. */
static kseal_status finish(unsigned failures_before, int result) {
    if (result == 0 && atomic_load(&failures) == failures_before)
        return KSEAL_OK;
    const char *call = here.code != 0 ? here.call : "CuTe host code";
    CUresult code = here.code != 0 ? here.code : result;
    here.call = NULL;
    here.code = 0;
    return code == 0 ? KSEAL_OK : kseal_driver_fail(call, code);
}

kseal_status kseal_cute_init(const struct kseal_variant *variant, const void *image, CUlibrary *library) {
    int result = 0;
    CUlibrary loaded = NULL, *loaded_at = &loaded;
    void *args[] = {&loaded_at, &result};
    unsigned before = atomic_load(&failures);
    here.image = image;
    variant->init(args);
    here.image = NULL;
    kseal_status status = finish(before, result);
    if (status == KSEAL_OK)
        *library = loaded;
    return status;
}

/* Whether the object looked up every kernel that the variant is known to have. */
static kseal_status check_kernels(const struct kseal_variant *variant, const CUkernel *kernels) {
    for (uint32_t i = 0; i < variant->kernel_count; i++)
        if (kernels[i] == NULL)
            return kseal_fail(KSEAL_MALFORMED, "%s: the host object did not load %s", variant->name, variant->kernels[i].entry);
    return KSEAL_OK;
}

kseal_status kseal_cute_load(const struct kseal_variant *variant, CUlibrary library, int device, CUkernel *kernels) {
    int result = 0;
    int32_t ordinal = device;
    CUlibrary *library_at = &library;
    void *args[] = {&library_at, &ordinal, &result};
    unsigned before = atomic_load(&failures);
    here.variant = variant;
    here.kernels = kernels;
    variant->load(args);
    here.variant = NULL;
    kseal_status status = finish(before, result);
    return status == KSEAL_OK ? check_kernels(variant, kernels) : status;
}

kseal_status kseal_cute_call(const struct kseal_variant *variant, void **args, int32_t count) {
    int32_t result = 0;
    unsigned before = atomic_load(&failures);
    args[count] = &result;
    variant->call(args, count + 1);
    return finish(before, result);
}

/*
 * The runtime functions that CuTe's generated code calls, by the names it uses. Each returns the driver's code; the numbers
 * of attributes are the same in the runtime and in the driver.
 */

int _cudaLibraryLoadData(CUlibrary *library, const void *embedded, void *jit_options, void *jit_values, unsigned jit_count,
                         void *library_options, void *library_values, unsigned library_count) {
    (void)embedded; /* unpatched and unverified */
    (void)jit_options, (void)jit_values, (void)jit_count;
    (void)library_options, (void)library_values, (void)library_count;
    if (here.image == NULL)
        return checked("cuLibraryLoadData", CUDA_ERROR_INVALID_IMAGE);
    return checked("cuLibraryLoadData", kseal_driver.cuLibraryLoadData(library, here.image, NULL, NULL, 0, NULL, NULL, 0));
}

int _cudaLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CUresult code = checked("cuLibraryGetKernel", kseal_driver.cuLibraryGetKernel(kernel, library, name));
    if (code != 0 || here.variant == NULL)
        return code;
    for (uint32_t i = 0; i < here.variant->kernel_count; i++)
        if (strcmp(here.variant->kernels[i].entry, name) == 0)
            here.kernels[i] = *kernel;
    return 0;
}

int _cudaGetDevice(int *device) { return checked("cuCtxGetDevice", kseal_driver.cuCtxGetDevice(device)); }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return checked("cuDeviceGetAttribute", kseal_driver.cuDeviceGetAttribute(value, attribute, device));
}

int _cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, int device) {
    return checked("cuKernelGetAttribute", kseal_driver.cuKernelGetAttribute(value, attribute, kernel, device));
}

int _cudaKernelSetAttributeForDevice(CUkernel kernel, int attribute, int value, int device) {
    return checked("cuKernelSetAttribute", kseal_driver.cuKernelSetAttribute(attribute, value, kernel, device));
}

int _cudaFuncSetAttribute(CUkernel kernel, int attribute, int value) {
    CUdevice device;
    CUresult code = _cudaGetDevice(&device);
    return code != 0 ? code : _cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}

/* cudaLaunchConfig_t: the driver's but for the width of the shared memory size. */
struct launch_config {
    uint32_t grid[3];
    uint32_t block[3];
    size_t dynamic_smem;
    CUstream stream;
    CUlaunchAttribute *attributes;
    uint32_t attribute_count;
};

int _cudaLaunchKernelEx(const struct launch_config *config, CUkernel kernel, void **params) {
    /* The object does not stop where cuda_dialect_assert_success was told of a failure, so the launch does. */
    if (atomic_load(&failures) != 0 && here.code != 0)
        return here.code;
    CUlaunchConfig launch = {
        .dynamic_smem = (uint32_t)config->dynamic_smem,
        .stream = config->stream,
        .attributes = config->attributes,
        .attribute_count = config->attribute_count,
    };
    memcpy(launch.grid, config->grid, sizeof launch.grid);
    memcpy(launch.block, config->block, sizeof launch.block);
    /* The driver takes a kernel where it takes a function. */
    return checked("cuLaunchKernelEx", kseal_driver.cuLaunchKernelEx(&launch, (CUfunction)(void *)kernel, params, NULL));
}

int _cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                            const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion,
                            int fill) {
    return checked("cuTensorMapEncodeTiled",
                   kseal_driver.cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, element_strides,
                                                       interleave, swizzle, promotion, fill));
}

/* CuTe's own prints and aborts. */
void cuda_dialect_assert_success(int code) { checked("CuTe host code", code); }
