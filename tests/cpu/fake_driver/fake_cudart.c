/* The runtime functions under CuTe's own host runtime, on the same pretend GPU. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "recorder.h"

struct cudart_config {
    uint32_t grid[3], block[3];
    size_t smem;
    void *stream;
    void *attributes;
    uint32_t attribute_count;
};

int cudaGetDevice(int *device) { return fake_current_device(device); }

int cudaDriverGetVersion(int *version) {
    *version = 13040;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) { return fake_device_attribute(value, attribute, device); }

int cudaLibraryLoadData(struct fake_library **library, const void *image, void *a, void *b, unsigned c, void *d, void *e,
                        unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    return fake_load(library, image);
}

int cudaLibraryGetKernel(struct fake_kernel **kernel, struct fake_library *library, const char *name) {
    return fake_get_kernel(kernel, library, name);
}

int cudaKernelSetAttributeForDevice(struct fake_kernel *kernel, int attribute, int value, int device) {
    return fake_set_kernel_attribute(attribute, value, kernel, device);
}

int cudaLaunchKernelExC(const struct cudart_config *config, struct fake_kernel *kernel, void **params) {
    struct fake_launch launch = {.smem = config->smem,
                                 .stream = config->stream,
                                 .attributes = config->attributes,
                                 .attribute_count = config->attribute_count};
    memcpy(launch.grid, config->grid, sizeof launch.grid);
    memcpy(launch.block, config->block, sizeof launch.block);
    return fake_launch(&launch, kernel, params);
}

/* CuTe's runtime asks for driver functions by name. */
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *result) {
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    *result = *function != NULL ? 0 : 1;
    return 0;
}

const char *cudaGetErrorName(int code) {
    (void)code;
    return "fake error";
}

const char *cudaGetErrorString(int code) {
    (void)code;
    return "fake error";
}
