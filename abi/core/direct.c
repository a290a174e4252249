#include "direct.h"

kseal_status kseal_direct_init(const void *image, CUlibrary *library) {
    CUlibrary loaded = NULL;
    CUresult code = kseal_driver.cuLibraryLoadData(&loaded, image, NULL, NULL, 0, NULL, NULL, 0);
    if (code != 0)
        return kseal_driver_fail("cuLibraryLoadData", code);
    *library = loaded;
    return KSEAL_OK;
}

kseal_status kseal_direct_load(const struct kseal_variant *variant, CUlibrary library, int device, CUkernel *kernel) {
    CUkernel found = NULL;
    CUresult code = kseal_driver.cuLibraryGetKernel(&found, library, variant->entry);
    if (code != 0)
        return kseal_driver_fail("cuLibraryGetKernel", code);
    code = kseal_driver.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)variant->dynamic_smem,
                                             found, device);
    if (code != 0)
        return kseal_driver_fail("cuKernelSetAttribute", code);
    *kernel = found;
    return KSEAL_OK;
}
