/* libcuda.so.1 without a GPU: the driver functions that kernseal and its examples call, each recorded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "recorder.h"

extern _Thread_local int fake_pushed;
extern int fake_capturing;
extern void *fake_capturing_stream;
int fake_device_count(void);

struct launch_config {
    uint32_t grid[3], block[3], smem;
    void *stream;
    void *attributes;
    uint32_t attribute_count;
};

#define INJECT(name)                                                                                                       \
    do {                                                                                                                   \
        int code_ = fake_injected(name);                                                                                   \
        if (code_ != 0)                                                                                                    \
            return code_;                                                                                                  \
    } while (0)

int cuInit(unsigned flags) {
    INJECT("cuInit");
    fake_record("cuInit", "\"flags\": %u", flags);
    return 0;
}

int cuDeviceGetCount(int *count) {
    INJECT("cuDeviceGetCount");
    *count = fake_device_count();
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    INJECT("cuDeviceGet");
    *device = ordinal;
    return ordinal < fake_device_count() ? 0 : 101;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    INJECT("cuDeviceGetAttribute");
    return fake_device_attribute(value, attribute, device);
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    INJECT("cuDevicePrimaryCtxRetain");
    fake_record("cuDevicePrimaryCtxRetain", "\"device\": %d", device);
    *context = (void *)(uintptr_t)(0x1000 + device);
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    fake_record("cuDevicePrimaryCtxRelease", "\"device\": %d", device);
    return 0;
}

int cuCtxGetDevice(int *device) {
    INJECT("cuCtxGetDevice");
    return fake_current_device(device);
}

int cuCtxGetCurrent(void **context) {
    int device;
    INJECT("cuCtxGetCurrent");
    *context = fake_current_device(&device) == 0 ? (void *)(uintptr_t)(0x1000 + device) : NULL;
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    INJECT("cuCtxPushCurrent");
    fake_pushed = (int)((uintptr_t)context - 0x1000);
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)(uintptr_t)(0x1000 + fake_pushed);
    fake_pushed = -1;
    return 0;
}

int cuCtxSetCurrent(void *context) {
    INJECT("cuCtxSetCurrent");
    fake_set_current((int)((uintptr_t)context - 0x1000));
    return 0;
}

int cuCtxSynchronize(void) {
    INJECT("cuCtxSynchronize");
    return 0;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == 900   ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
            : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                          : NULL;
    return *name != NULL ? 0 : 1;
}

int cuGetErrorString(int code, const char **string) {
    *string = code == 209 ? "no kernel image is available for execution on the device" : NULL;
    return *string != NULL ? 0 : 1;
}

int cuStreamIsCapturing(void *stream, int *status) {
    INJECT("cuStreamIsCapturing");
    *status = fake_capturing != 0 || (stream != NULL && stream == fake_capturing_stream);
    return 0;
}

int cuLibraryLoadData(struct fake_library **library, const void *image, void *a, void *b, unsigned c, void *d, void *e,
                      unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    INJECT("cuLibraryLoadData");
    return fake_load(library, image);
}

#ifndef FAKE_OMIT_UNLOAD
int cuLibraryUnload(struct fake_library *library) {
    library->loaded = 0;
    fake_record("unload", "\"first_byte\": %u", library->head[0]);
    INJECT("cuLibraryUnload");
    return 0;
}
#endif

int cuLibraryGetKernel(struct fake_kernel **kernel, struct fake_library *library, const char *name) {
    INJECT("cuLibraryGetKernel");
    return fake_get_kernel(kernel, library, name);
}

int cuKernelGetFunction(void **function, struct fake_kernel *kernel) {
    INJECT("cuKernelGetFunction");
    int device = -1;
    int code = fake_current_device(&device);
    fake_record("cuKernelGetFunction", "\"kernel\": \"%s\", \"device\": %d", kernel->name, device);
    *function = kernel;
    return code;
}

int cuKernelGetAttribute(int *value, int attribute, struct fake_kernel *kernel, int device) {
    INJECT("cuKernelGetAttribute");
    return fake_kernel_attribute(value, attribute, kernel, device);
}

int cuKernelSetAttribute(int attribute, int value, struct fake_kernel *kernel, int device) {
    INJECT("cuKernelSetAttribute");
    return fake_set_kernel_attribute(attribute, value, kernel, device);
}

int cuLaunchKernelEx(const struct launch_config *config, struct fake_kernel *kernel, void **params, void **extra) {
    (void)extra;
    INJECT("cuLaunchKernelEx");
    struct fake_launch launch = {.smem = config->smem,
                                 .stream = config->stream,
                                 .attributes = config->attributes,
                                 .attribute_count = config->attribute_count};
    memcpy(launch.grid, config->grid, sizeof launch.grid);
    memcpy(launch.block, config->block, sizeof launch.block);
    return fake_launch(&launch, kernel, params);
}

struct list {
    char text[160];
};

/* The first `count` of `values` as JSON. */
static struct list list_of(const uint64_t *values, uint32_t count) {
    struct list list = {"["};
    size_t used = 1;
    for (uint32_t i = 0; i < count; i++)
        used += (size_t)snprintf(list.text + used, sizeof list.text - used, "%s%llu", i == 0 ? "" : ", ",
                                 (unsigned long long)values[i]);
    snprintf(list.text + used, sizeof list.text - used, "]");
    return list;
}

static struct list list_of_u32(const uint32_t *values, uint32_t count) {
    uint64_t wide[5] = {0};
    for (uint32_t i = 0; i < count && i < 5; i++)
        wide[i] = values[i];
    return list_of(wide, count);
}

/* Stores its arguments readably instead of the hardware's encoding; what has no room there is in the log. */
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion,
                           int fill) {
    INJECT("cuTensorMapEncodeTiled");
    uint64_t words[16] = {(uintptr_t)address, sizes[0], rank > 1 ? sizes[1] : 0, rank > 1 ? strides[0] : 0, box[0],
                          element_strides[0]};
    uint32_t numbers[] = {(uint32_t)type, rank, (uint32_t)interleave, (uint32_t)swizzle, (uint32_t)promotion, (uint32_t)fill};
    memcpy(words + 8, numbers, sizeof numbers);
    memcpy(map, words, sizeof words);
    fake_record("encode",
                "\"type\": %d, \"address\": %llu, \"sizes\": %s, \"strides\": %s, \"box\": %s, \"element_strides\": %s, "
                "\"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, \"fill\": %d",
                type, (unsigned long long)(uintptr_t)address, list_of(sizes, rank).text, list_of(strides, rank - 1).text,
                list_of_u32(box, rank).text, list_of_u32(element_strides, rank).text, interleave, swizzle, promotion, fill);
    return 0;
}

/* Device memory is host memory. */
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    INJECT("cuMemAlloc");
    void *memory = aligned_alloc(256, (size + 255) / 256 * 256);
    *address = (uintptr_t)memory;
    return memory != NULL ? 0 : 2;
}

int cuMemFree_v2(uint64_t address) {
    free((void *)(uintptr_t)address);
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    INJECT("cuMemcpyHtoD");
    memcpy((void *)(uintptr_t)to, from, size);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    INJECT("cuMemcpyDtoH");
    memcpy(to, (const void *)(uintptr_t)from, size);
    return 0;
}

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
    memset((void *)(uintptr_t)address, value, size);
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
    INJECT("cuStreamCreate");
    static _Atomic uintptr_t next = 0x5000;
    (void)flags;
    *stream = (void *)(next += 0x100);
    return 0;
}

int cuStreamDestroy_v2(void *stream) {
    (void)stream;
    return 0;
}

int cuStreamSynchronize(void *stream) {
    INJECT("cuStreamSynchronize");
    (void)stream;
    return 0;
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
    INJECT("cuStreamBeginCapture");
    (void)mode;
    return fake_begin_capture(stream);
}

int cuStreamEndCapture(void *stream, void **graph) {
    INJECT("cuStreamEndCapture");
    *graph = (void *)(uintptr_t)1;
    return fake_end_capture(stream);
}

int cuGraphGetNodes(void *graph, struct fake_node **nodes, size_t *count) {
    (void)graph;
    return fake_graph_nodes(nodes, count);
}

struct node_params {
    void *function;
    uint32_t grid[3], block[3], smem;
    void **params, **extra;
    const struct fake_kernel *kernel;
    void *context;
};

/* As the driver does for a kernel of a library: the function is null. */
int cuGraphKernelNodeGetParams_v2(struct fake_node *node, struct node_params *params) {
    struct fake_launch launch;
    memset(params, 0, sizeof *params);
    fake_node_launch(node, &launch, &params->kernel, &params->params);
    memcpy(params->grid, launch.grid, sizeof launch.grid);
    memcpy(params->block, launch.block, sizeof launch.block);
    params->smem = (uint32_t)launch.smem;
    return 0;
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    INJECT("cuGraphInstantiateWithFlags");
    (void)flags;
    *executable = graph;
    return 0;
}

int cuGraphLaunch(void *executable, void *stream) {
    INJECT("cuGraphLaunch");
    (void)executable;
    return fake_launch_graph(stream);
}

int cuGraphExecDestroy(void *executable) {
    (void)executable;
    return 0;
}

int cuGraphDestroy(void *graph) {
    (void)graph;
    return 0;
}
