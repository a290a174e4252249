// kernseal.hpp: who owns what, and what an error says. `test_wrapper NAME FOLDER SHA256` runs one test.
#include "kernseal.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <thread>
#include <type_traits>

using Gdn = kernseal::Prepared<kernseal::GdnPrefill>;
using Xqa = kernseal::Prepared<kernseal::XqaDecode>;

static_assert(std::is_copy_constructible_v<kernseal::Library> && std::is_copy_assignable_v<kernseal::Library>);
static_assert(!std::is_copy_constructible_v<kernseal::Bundle> && !std::is_copy_constructible_v<Gdn>);
static_assert(std::is_nothrow_move_constructible_v<kernseal::Bundle> && std::is_move_assignable_v<kernseal::Bundle>);
static_assert(std::is_nothrow_move_constructible_v<Gdn> && std::is_move_assignable_v<Gdn>);
static_assert(!std::is_constructible_v<Gdn, kernseal::Library, kseal_gdn_prefill *>);
static_assert(!kernseal::GdnPrefill::has_semaphores && kernseal::XqaDecode::has_semaphores);
static_assert(!kernseal::GdnPrefill::has_plan);
static_assert(noexcept(std::declval<const Gdn &>().try_run(std::declval<const kseal_gdn_prefill_args &>())));

namespace {

#define CHECK(condition)                                                                                                   \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                           \
            std::exit(1);                                                                                                  \
        }                                                                                                                  \
    } while (0)

std::string folder, sha256;

kernseal::Bundle open() { return kernseal::open(folder, sha256); }

kseal_gdn_prefill_config config() {
    auto made = kernseal::GdnPrefill::config();
    made.dtype = KSEAL_DTYPE_BF16;
    made.state_dtype = KSEAL_DTYPE_F32;
    made.state_layout = KSEAL_STATE_LAYOUT_HVK;
    made.index_dtype = KSEAL_DTYPE_I64;
    made.initial_state = made.alpha = made.beta = 1;
    return made;
}

void refuses(kseal_status status, const std::string &text, const std::function<void()> &call) {
    try {
        call();
    } catch (const kernseal::Error &error) {
        if (error.status() == status && std::string(error.what()).find(text) != std::string::npos)
            return;
        std::fprintf(stderr, "status %d: %s\n", error.status(), error.what());
        std::exit(1);
    }
    std::fprintf(stderr, "nothing was thrown; expected: %s\n", text.c_str());
    std::exit(1);
}

// How often the fake driver was asked for something.
int logged(const std::string &call) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    const char *(*log)();
    void *symbol = dlsym(driver, "fake_log");
    std::memcpy(&log, &symbol, sizeof log);
    const std::string text = log(), wanted = "{\"call\": \"" + call + "\"";
    int count = 0;
    for (std::size_t at = text.find(wanted); at != std::string::npos; at = text.find(wanted, at + 1))
        count++;
    return count;
}

void a_handle_ends_once_wherever_it_is_moved() {
    kernseal::Bundle bundle = open(), other = std::move(bundle);
    std::vector<Gdn> handles;
    for (int i = 0; i < 10; i++) // moved whenever the vector grows
        handles.push_back(other.prepare<kernseal::GdnPrefill>(config()));
    CHECK(logged("load") == 1 && logged("unload") == 0);
    handles.erase(handles.begin() + 1, handles.end());
    CHECK(logged("unload") == 0);
    handles.front() = other.prepare<kernseal::GdnPrefill>(config());
    CHECK(logged("unload") == 0);
    handles.clear();
    CHECK(logged("unload") == 1);
}

void a_handle_outlives_its_bundle_and_its_library_object() {
    std::vector<Gdn> kept;
    {
        const kernseal::Library library = kernseal::Library::load(folder, sha256);
        kept.push_back(library.open(folder).prepare<kernseal::GdnPrefill>(config()));
    }
    kept.front().run(kernseal::GdnPrefill::args()); // no sequences
    CHECK(kept.front().workspace_size(kernseal::GdnPrefill::args()) == 132 * 128);
    CHECK(kept.front().semaphores_size(kernseal::GdnPrefill::args()) == 0);
    CHECK(kept.front().plan_size(kernseal::GdnPrefill::args()) == 0);
}

void what_was_moved_from_or_released_refuses() {
    kernseal::Bundle bundle = open(), moved = std::move(bundle);
    refuses(KSEAL_INVALID_ARGUMENT, "bundle is null", [&] { bundle.prepare<kernseal::GdnPrefill>(config()); });
    Gdn handle = moved.prepare<kernseal::GdnPrefill>(config());
    handle.release();
    CHECK(logged("unload") == 1);
    refuses(KSEAL_INVALID_ARGUMENT, "handle is null", [&] { handle.run(kernseal::GdnPrefill::args()); });
    handle.release(); // nothing is left to release
    CHECK(logged("unload") == 1);
}

void an_error_has_its_status_and_every_word() {
    const kernseal::Bundle bundle = open();
    auto wrong = config();
    wrong.dtype = 99;
    refuses(KSEAL_INVALID_ARGUMENT, "invalid_argument: gdn_prefill: config.dtype is 99; it must be bf16 (1) or f16 (2)",
            [&] { bundle.prepare<kernseal::GdnPrefill>(wrong); });
    wrong.dtype = KSEAL_DTYPE_F16;
    refuses(KSEAL_UNSUPPORTED, "unsupported: gdn_prefill: no variant for dtype=f16",
            [&] { bundle.prepare<kernseal::GdnPrefill>(wrong); });
    const Gdn handle = bundle.prepare<kernseal::GdnPrefill>(config());
    auto args = kernseal::GdnPrefill::args();
    args.num_seqs = -1;
    refuses(KSEAL_INVALID_ARGUMENT, "num_seqs is -1", [&] { handle.run(args); });
    CHECK(handle.try_run(args) == KSEAL_INVALID_ARGUMENT);
    CHECK(std::string(handle.library().api().kseal_last_error()).find("num_seqs is -1") != std::string::npos);
}

void variants_are_those_of_the_bundle() {
    const auto variants = open().variants();
    CHECK(variants.size() == 2);
    CHECK(std::string(variants[0].op) == kernseal::GdnPrefill::name && std::string(variants[1].op) == kernseal::XqaDecode::name);
    CHECK(variants[0].struct_size == sizeof variants[0] && std::string(variants[0].sm) == "sm_90a");
}

void threads_share_a_handle() {
    const kernseal::Bundle bundle = open();
    const Gdn handle = bundle.prepare<kernseal::GdnPrefill>(config());
    std::vector<std::thread> threads;
    for (int i = 1; i <= 8; i++)
        threads.emplace_back([&, i] {
            auto args = kernseal::GdnPrefill::args();
            for (int round = 0; round < 50; round++) {
                args.num_seqs = 0;
                handle.run(args);
                args.num_seqs = -i;
                refuses(KSEAL_INVALID_ARGUMENT, "num_seqs is -" + std::to_string(i) + ";", [&] { handle.run(args); });
            }
        });
    for (std::thread &thread : threads)
        thread.join();
}

void a_library_of_another_abi_is_refused() {
    const char *expected = std::getenv("EXPECTED");
    refuses(KSEAL_ABI_MISMATCH, expected != nullptr ? expected : "?", [] { kernseal::Library::load(folder, sha256); });
}

const std::map<std::string, void (*)()> tests = {
#define TEST(name) {#name, name}
    TEST(a_handle_ends_once_wherever_it_is_moved),
    TEST(a_handle_outlives_its_bundle_and_its_library_object),
    TEST(what_was_moved_from_or_released_refuses),
    TEST(an_error_has_its_status_and_every_word),
    TEST(variants_are_those_of_the_bundle),
    TEST(threads_share_a_handle),
    TEST(a_library_of_another_abi_is_refused),
};

} // namespace

int main(int argc, char **argv) {
    if (argc != 4 || tests.count(argv[1]) == 0) {
        std::fprintf(stderr, "usage: test_wrapper NAME FOLDER SHA256\n");
        return 2;
    }
    folder = argv[2];
    sha256 = argv[3];
    try {
        tests.at(argv[1])();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
