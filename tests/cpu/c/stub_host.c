/* Host objects with the symbols and calls of CuTe's, for tests that need no compiler for GPUs. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "stub_host.h"

int _cudaLibraryLoadData(void **library, const void *code, void *, void *, unsigned, void *, void *, unsigned);
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name);
int _cudaDeviceGetAttribute(int *value, int attribute, int device);
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device);
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device);
int _cudaFuncSetAttribute(void *kernel, int attribute, int value);
int _cudaGetDevice(int *device);
int _cudaLaunchKernelEx(const void *config, void *kernel, void **params);
int _cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                            const uint32_t *box, const uint32_t *element_strides, int interleave, int swizzle, int promotion,
                            int fill);
void cuda_dialect_assert_success(int code);

enum stub_mode stub_mode;
_Atomic int stub_argument_count;

struct config {
    uint32_t grid[3], block[3];
    size_t smem;
    void *stream;
    void *attributes;
    uint32_t attribute_count;
};

static int init(void **args) {
    static const char embedded[16] = "embedded image";
    return _cudaLibraryLoadData(*(void ***)args[0], embedded, NULL, NULL, 0, NULL, NULL, 0);
}

static int load(void **args, _Atomic(void *) *kernel, const char *prefix) {
    void *library = **(void ***)args[0], *found = NULL;
    int device = *(int *)args[1], value = 0, current = 0;
    int code = _cudaLibraryGetKernel(&found, library, "stub");
    if (code == 0 && strcmp(prefix, "pooled_ckpt") == 0 && stub_mode != STUB_LOAD_ONE)
        code = _cudaLibraryGetKernel(&(void *){NULL}, library, "second");
    if (code == 0)
        code = _cudaDeviceGetAttribute(&value, 97, device);
    if (code == 0)
        code = _cuKernelGetAttribute(&value, 1, found, device);
    if (code == 0)
        code = _cudaKernelSetAttributeForDevice(found, 8, 4096, device);
    if (code == 0 && _cudaGetDevice(&current) == 0 && current == device)
        code = _cudaFuncSetAttribute(found, 14, 1);
    atomic_store(kernel, found);
    return code;
}

static int call(void **args, int32_t count, void *kernel) {
    /* The stream is the last argument before the result. */
    struct config config = {.grid = {1, 1, 1}, .block = {32, 1, 1}, .stream = *(void **)args[count - 2]};
    uint64_t map[16] = {0}, sizes[1] = {16};
    uint32_t one[1] = {1};
    atomic_store(&stub_argument_count, count);
    if (stub_mode == STUB_FAIL_QUIETLY)
        return 700;
    if (stub_mode == STUB_ENCODE)
        cuda_dialect_assert_success(_cuTensorMapEncodeTiled(map, 0, 1, args[0], sizes, sizes, one, one, 0, 0, 0, 0));
    int code = _cudaLaunchKernelEx(&config, kernel, args);
    return stub_mode == STUB_IGNORE_LAUNCH ? 0 : code;
}

#define HOST(prefix)                                                                                                       \
    static _Atomic(void *) kernel_##prefix;                                                                                \
    void _mlir_##prefix##_cuda_init(void **args) { *(int *)args[1] = init(args); }                                         \
    void _mlir_##prefix##_cuda_load_to_device(void **args) { *(int *)args[2] = load(args, &kernel_##prefix, #prefix); }    \
    void _mlir_##prefix##__mlir_ciface_f(void **args, int32_t count) {                                                     \
        *(int32_t *)args[count - 1] = call(args, count, atomic_load(&kernel_##prefix));                                    \
    }

HOST(packed)
HOST(pooled)
HOST(pooled_ckpt)
HOST(plain)
HOST(i32)
HOST(blackwell)
