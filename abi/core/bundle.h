/* An open bundle: its folder, pinned by a descriptor. */
#ifndef KSEAL_CORE_BUNDLE_H
#define KSEAL_CORE_BUNDLE_H

#include "error.h"

struct kseal_bundle {
    int dirfd;
};

#endif
