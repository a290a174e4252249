#define _GNU_SOURCE
#include "bundle.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernseal_sizes.h"
#include "variant.h"

static kseal_status check_args(const kseal_open_args *args) {
    const uint32_t major = KSEAL_ABI_VERSION >> 16;
    if (args->abi_version >> 16 != major || args->abi_version > KSEAL_ABI_VERSION)
        return kseal_fail(KSEAL_ABI_MISMATCH, "abi_version is %u.%u; this library has %u.%u", args->abi_version >> 16,
                          args->abi_version & 0xffff, major, KSEAL_ABI_VERSION & 0xffff);
    if ((args->flags & ~(uint32_t)KSEAL_OPEN_FLAG_VALIDATION) != 0)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "flags is 0x%x; only KSEAL_OPEN_FLAG_VALIDATION (0x%x) is known", args->flags,
                          (unsigned)KSEAL_OPEN_FLAG_VALIDATION);
    if (args->bundle_path == NULL)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "bundle_path is null");
    if (kseal_library_retargeted && !(args->flags & KSEAL_OPEN_FLAG_VALIDATION))
        return kseal_fail(KSEAL_WRONG_SM,
                          "these are kernels for %s rebuilt for %s, to validate them; open with KSEAL_OPEN_FLAG_VALIDATION "
                          "if that is what you want",
                          kseal_library_target, kseal_library_sm);
    return KSEAL_OK;
}

static kseal_status open_folder(const char *path, int *dirfd) {
    char text[128] = "";
    *dirfd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*dirfd >= 0)
        return KSEAL_OK;
    int code = errno;
    if (code == ENOENT)
        return kseal_fail(KSEAL_MISSING, "bundle_path: %s is not there", path);
    if (code == ENOTDIR || code == ELOOP)
        return kseal_fail(KSEAL_MALFORMED, "bundle_path: %s is not a folder, or a symbolic link to one", path);
    return kseal_fail(KSEAL_IO_ERROR, "bundle_path: %s: %s", path, strerror_r(code, text, sizeof text));
}

KSEAL_API kseal_status kseal_open(const kseal_open_args *args, kseal_bundle **bundle) {
    kseal_open_args a;
    if (bundle == NULL)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "bundle is null");
    *bundle = NULL;
    kseal_status status = kseal_read_struct(&a, sizeof a, KSEAL_OPEN_ARGS_MIN_SIZE, args, "kseal_open_args");
    if (status == KSEAL_OK)
        status = check_args(&a);
    if (status == KSEAL_OK)
        status = kseal_driver_open();
    if (status != KSEAL_OK)
        return status;
    kseal_bundle *opened = malloc(sizeof *opened);
    if (opened == NULL)
        return kseal_fail(KSEAL_OUT_OF_MEMORY, "no memory for a bundle");
    status = open_folder(a.bundle_path, &opened->dirfd);
    if (status != KSEAL_OK) {
        free(opened);
        return status;
    }
    *bundle = opened;
    return KSEAL_OK;
}

KSEAL_API void kseal_close(kseal_bundle *bundle) {
    if (bundle == NULL)
        return;
    close(bundle->dirfd);
    free(bundle);
}

KSEAL_API uint32_t kseal_variant_count(kseal_bundle *bundle) {
    (void)bundle; /* reserved: a bundle holds what its library holds */
    return kseal_variant_total;
}

KSEAL_API kseal_status kseal_variant_at(kseal_bundle *bundle, uint32_t index, kseal_variant_info *info) {
    if (bundle == NULL || info == NULL)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "%s is null", bundle == NULL ? "bundle" : "info");
    if (index >= kseal_variant_total)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "index is %u; there are %u variants", index, kseal_variant_total);
    const struct kseal_variant *v = &kseal_variants[index];
    const kseal_variant_info ours = {
        .evidence = v->evidence,
        .op = v->op,
        .variant = v->name,
        .class_name = v->class_name,
        .axes = v->axes_text,
        .entry = v->kernels[0].entry,
        .sm = kseal_library_sm,
        .file = v->file,
        .sha256 = v->sha256,
        .size = v->size,
        .registers = v->kernels[0].registers,
        .spill_bytes = v->kernels[0].spill_bytes,
        .static_smem = v->kernels[0].static_smem,
        .dynamic_smem = v->kernels[0].dynamic_smem,
    };
    return kseal_write_struct(info, KSEAL_VARIANT_INFO_MIN_SIZE, &ours, sizeof ours, "kseal_variant_info");
}
