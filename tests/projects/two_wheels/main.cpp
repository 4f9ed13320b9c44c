#include <careful/models.h>
#include <example_project/models.h>

#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>

#include <cstdio>
#include <thread>

namespace {

void values(const std::string& folder) {
  careful::Model lookup("lookup", folder);
  careful::Model quotient("quotient", folder);
  for (const int threads : {1, 8}) {
    at::set_num_threads(threads);
    for (const int64_t batch : {1, 4, 1024}) {
      const at::Tensor index = at::full({batch, 8}, 7, at::kLong);
      const at::Tensor before = lookup.run({index}).at(0);
      for (const int64_t wrong : {100, -1}) {
        at::Tensor bad = index.clone();
        bad[batch - 1][7] = wrong;
        try {
          lookup.run({bad});
          std::printf("lookup answers %d\n", static_cast<int>(wrong));
        } catch (const careful::RunError& error) {
          std::printf("%s\n", error.what());
        }
      }
      try {
        quotient.run({index, at::full({batch, 8}, 0, at::kLong)});
        std::printf("quotient answers\n");
      } catch (const careful::RunError& error) {
        std::printf("%s\n", error.what());
      }
      const bool three = quotient.run({index, at::full({batch, 8}, -2, at::kLong)}).at(0).eq(-3).all().item<bool>();
      std::printf("%s\n", three && lookup.run({index}).at(0).equal(before) ? "goes on" : "other answers");
    }
  }
}

void threads(const std::string& folder, const std::string& other) {
  std::vector<std::thread> all;
  for (int number = 0; number < 16; ++number) {
    all.emplace_back([&, number] {
      for (int round = 0; round < 50; ++round) {
        try {
          if ((number + round) % 2 == 0) {
            careful::Model("lookup", folder).run({at::full({1, 8}, 7, at::kLong)});
          } else {
            example_project::Model("ranker", other).run({at::randn({2, 10})});
          }
        } catch (const std::exception& error) {
          std::printf("%s\n", error.what());
        }
      }
    });
  }
  for (std::thread& thread : all) {
    thread.join();
  }
  std::printf("800 loads\n");
}

}  // namespace

int main(int, char** argv) {
  if (std::string(argv[1]) == "values") {
    values(argv[2]);
  } else {
    threads(argv[2], argv[3]);
  }
}
