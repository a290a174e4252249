#include "direct.h"

kseal_status kseal_direct_init(const void *image, CUlibrary *library) {
    CUlibrary loaded = NULL;
    CUresult code = kseal_driver.cuLibraryLoadData(&loaded, image, NULL, NULL, 0, NULL, NULL, 0);
    if (code != 0)
        return kseal_driver_fail("cuLibraryLoadData", code);
    *library = loaded;
    return KSEAL_OK;
}

static kseal_status load(const struct kseal_kernel *kernel, CUlibrary library, int device, CUkernel *loaded) {
    CUresult code = kseal_driver.cuLibraryGetKernel(loaded, library, kernel->entry);
    if (code != 0)
        return kseal_driver_fail("cuLibraryGetKernel", code);
    code = kseal_driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)kernel->dynamic_smem,
                                             *loaded, device);
    return code == 0 ? KSEAL_OK : kseal_driver_fail("cuKernelSetAttribute", code);
}

kseal_status kseal_direct_load(const struct kseal_variant *variant, CUlibrary library, int device, CUkernel *kernels) {
    kseal_status status = KSEAL_OK;
    for (uint32_t i = 0; i < variant->kernel_count && status == KSEAL_OK; i++)
        status = load(&variant->kernels[i], library, device, &kernels[i]);
    return status;
}
