// An op that plans on the host, through kernseal.hpp: `test_plan FOLDER SHA256` plans a step and prints it.
#include "kernseal.hpp"

#include <cstdio>

static_assert(kernseal::RaggedPrefill::has_plan && !kernseal::GdnPrefill::has_plan);

int main(int, char **argv) {
    using Op = kernseal::RaggedPrefill;
    const kernseal::Bundle bundle = kernseal::open(argv[1], argv[2]);
    auto config = Op::config();
    config.device = -1;
    config.dtype = KSEAL_DTYPE_BF16;
    config.head_dim = config.v_dim = 128;
    config.causal = 1;
    const auto op = bundle.prepare<Op>(config);

    const std::vector<std::int32_t> ends = {0, 100, 130};
    auto args = Op::args();
    args.num_q_heads = args.num_kv_heads = 1;
    args.sm_scale = 1.0f;
    args.batch_size = 2;
    args.total_q = args.total_kv = 130;
    args.qo_indptr = args.kv_indptr = ends.data();
    args.plan_bytes = op.plan_size(args);
    std::vector<std::uint64_t> plan((args.plan_bytes + 7) / 8);
    args.plan = plan.data();
    const std::uint64_t used = op.plan(args);
    std::printf("%.8s %d\n", reinterpret_cast<const char *>(plan.data()), used > 0 && used <= args.plan_bytes);
    args.plan_bytes = used - 1;
    try {
        op.plan(args);
    } catch (const kernseal::Error &error) {
        std::printf("%s\n", error.what());
    }
}
