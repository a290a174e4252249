/* What a file compiled by nvcc needs of the CUDA runtime: it has one kernel, whose launches are recorded as the driver's are. */
#include <stdlib.h>
#include <string.h>

#include "recorder.h"

static struct fake_kernel kernel = {.name = "kernel_mha"};

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name) {
    (void)handle, (void)host, (void)device, (void)name;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name) {
    (void)handle, (void)host, (void)device, (void)name;
}
char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

/* The only symbol ever read is the kernel's shared memory; the test knows it from the cubin. */
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
    (void)symbol, (void)offset, (void)kind;
    const char *text = getenv("UPSTREAM_SMEM");
    uint32_t value = text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 0;
    memcpy(to, &value, size);
    return 0;
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}
int cudaPeekAtLastError(void) { return 0; }

struct cudart_config {
    uint32_t grid[3], block[3];
    size_t smem;
    void *stream;
    void *attributes;
    uint32_t attribute_count;
};

int cudaLaunchKernelExC(const struct cudart_config *config, const void *function, void **params) {
    (void)function;
    struct fake_launch launch = {.smem = config->smem,
                                 .stream = config->stream,
                                 .attributes = config->attributes,
                                 .attribute_count = config->attribute_count};
    memcpy(launch.grid, config->grid, sizeof launch.grid);
    memcpy(launch.block, config->block, sizeof launch.block);
    return fake_launch(&launch, &kernel, params);
}
