/* What FAKE_CUDA_KERNEL names: the kernels by their names in the images. */
#include "kernels.h"

#include <stdlib.h>

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void fake_kernel(const char *name, void **params);
EXPORTED uint32_t fake_kernel_param_size(const char *name, uint32_t index);

static int is_gdn(const char *name) { return strstr(name, "delta_rule_sm90") != NULL; }

static int is_xqa(const char *name) { return strcmp(name, "kernel_mha") == 0; }

void fake_kernel(const char *name, void **params) {
    if (is_gdn(name))
        gdn_kernel(params);
    else if (is_xqa(name))
        xqa_kernel(params);
    else
        abort();
}

uint32_t fake_kernel_param_size(const char *name, uint32_t index) {
    return is_gdn(name) ? gdn_param_size(index) : is_xqa(name) ? xqa_param_size(index) : 0;
}
