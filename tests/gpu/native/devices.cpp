// Two devices in one process: each handle runs on its own and is refused on the other, and both give the same bits.
// Exits with 77 where there are fewer than two devices.
//
//     devices BUNDLE

#include "common.hpp"

#include <cstdio>
#include <memory>
#include <thread>

namespace {

constexpr int SKIPPED = 77;
constexpr int LAUNCHES = 10;

// The status that a run gives, and whether its message has `text`.
void expect_refusal(const Gdn &prefill, const Problem &problem, const std::string &text) {
    try {
        prefill.run(problem.args());
    } catch (const kernseal::Error &error) {
        if (error.status() != KSEAL_NOT_PREPARED || std::string(error.what()).find(text) == std::string::npos)
            fail(std::string("refused, but with: ") + error.what());
        return;
    }
    fail("a handle ran on a device that it was not prepared for");
}

void launch(const Cuda &cuda, const Gdn &prefill, const Problem &problem) {
    for (int i = 0; i < LAUNCHES; i++)
        prefill.run(problem.args());
    cuda.call("cuCtxSynchronize");
}

int run(const std::string &folder) {
    Cuda cuda;
    if (cuda.devices() < 2) {
        std::printf("skipped: %d device here, two are needed\n", cuda.devices());
        return SKIPPED;
    }
    const kernseal::Bundle bundle = kernseal::open(folder, KSEAL_PINS_LIBRARY_SHA256);
    std::vector<Gdn> prefills;
    std::vector<std::unique_ptr<Problem>> problems;
    for (int device : {0, 1}) {
        cuda.use(device);
        prefills.push_back(prepare(bundle, device));
        problems.push_back(std::make_unique<Problem>(cuda, prefills.back(), 1.0f, nullptr));
    }
    for (std::size_t device : {std::size_t{0}, std::size_t{1}}) {
        cuda.use(static_cast<int>(device));
        const std::string here = std::to_string(device), there = std::to_string(1 - device);
        expect_refusal(prefills[1 - device], *problems[device], "device " + here + " is current; this handle was prepared for device " + there);
        launch(cuda, prefills[device], *problems[device]);
    }
    // Each read where it is; a wrong device would have left zeros.
    cuda.use(0);
    const std::vector<float> zero = problems[0]->state();
    cuda.use(1);
    const std::vector<float> one = problems[1]->state();
    if (zero != one || zero[0] == 0.0f)
        fail("the devices give different bits, or none");

    // Prepared for a device that is not current: with its primary context, which a thread without one is given.
    cuda.use(0);
    const Gdn elsewhere = prepare(bundle, 1);
    cuda.use(1);
    const Problem problem(cuda, elsewhere, 1.0f, nullptr);
    std::string failure;
    std::thread([&] {
        try {
            for (int i = 0; i < LAUNCHES; i++)
                elsewhere.run(problem.args());
        } catch (const std::exception &error) {
            failure = error.what();
        }
    }).join();
    if (!failure.empty())
        fail(failure);
    cuda.call("cuCtxSynchronize");
    if (problem.state() != one)
        fail("a thread without a context gave other bits");
    std::puts("ok: two devices, each handle on its own, the same bits on both");
    return 0;
}

} // namespace

int main(int argc, char **argv) {
    try {
        if (argc != 2)
            fail("usage: devices BUNDLE");
        return run(argv[1]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
