/* What upstream's launchers of FA2 prefill need of the CUDA runtime. Launches are recorded as the driver's are. */
#include <string.h>

#include "recorder.h"

static struct fake_kernel tile = {.name = "tile"}, merge = {.name = "merge"};
static const void *functions[32]; /* those that merge */
static int merges, smem_per_sm, smem_per_block;

/* What a device of the SM that is pretended has. */
void upstream_device(int per_sm, int per_block) {
    smem_per_sm = per_sm;
    smem_per_block = per_block;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name) {
    (void)handle, (void)device;
    if (strstr(name, "MergeStates") != NULL && merges < 32)
        functions[merges++] = host;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name) {
    (void)handle, (void)host, (void)device, (void)name;
}
char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

int cudaGetDevice(int *device) { return *device = 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 81) /* cudaDevAttrMaxSharedMemoryPerMultiprocessor */
        return *value = smem_per_sm, 0;
    if (attribute == 97) /* cudaDevAttrMaxSharedMemoryPerBlockOptin */
        return *value = smem_per_block, 0;
    return fake_device_attribute(value, attribute, device);
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t smem,
                                                           unsigned flags) {
    (void)function, (void)threads, (void)smem, (void)flags;
    return *blocks = 8, 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t smem) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, smem, 0);
}
const char *cudaGetErrorString(int code) {
    (void)code;
    return "no error of CUDA's";
}
int cudaGetLastError(void) { return 0; }

static const struct fake_kernel *kernel_of(const void *function) {
    for (int i = 0; i < merges; i++)
        if (functions[i] == function)
            return &merge;
    return &tile;
}

struct cudart_config {
    uint32_t grid[3], block[3];
    size_t smem;
    void *stream;
    void *attributes;
    uint32_t attribute_count;
};

int cudaLaunchKernelExC(const struct cudart_config *config, const void *function, void **params) {
    struct fake_launch launch = {.smem = config->smem,
                                 .stream = config->stream,
                                 .attributes = config->attributes,
                                 .attribute_count = config->attribute_count};
    memcpy(launch.grid, config->grid, sizeof launch.grid);
    memcpy(launch.block, config->block, sizeof launch.block);
    return fake_launch(&launch, kernel_of(function), params);
}

struct dim {
    uint32_t x, y, z;
};
int cudaLaunchKernel(const void *function, struct dim grid, struct dim block, void **params, size_t smem, void *stream) {
    struct fake_launch launch = {
        .grid = {grid.x, grid.y, grid.z}, .block = {block.x, block.y, block.z}, .smem = smem, .stream = stream};
    return fake_launch(&launch, kernel_of(function), params);
}
