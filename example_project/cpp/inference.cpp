// Run a compiled model on images of handwritten digits: a batch of eight, then a batch of one.
//
//     inference [MODEL [MODELS_DIR [IMAGES]]]
//
// By default: `digits` of the package that CMake found, and the images that come with the example.

#include <example_project/models.h>

#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

/// Read images as text, 64 pixels from 0 to 16 each; return float32 [images, 1, 8, 8].
at::Tensor read_images(const std::string& path) {
  std::ifstream file(path);
  const std::vector<float> pixels{std::istream_iterator<float>(file), std::istream_iterator<float>()};
  if (pixels.empty() || pixels.size() % 64 != 0) {
    throw std::runtime_error(path + " has no images of 64 pixels");
  }
  return at::tensor(pixels).reshape({-1, 1, 8, 8});
}

/// Print the results with four decimals, a row for each image.
void print_rows(const at::Tensor& rows) {
  const at::Tensor values = rows.contiguous();
  const float* value = values.const_data_ptr<float>();
  for (int64_t row = 0; row < values.size(0); ++row) {
    for (int64_t column = 0; column < values.size(1); ++column) {
      std::printf("%s%.4f", column == 0 ? "" : " ", *value++);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string name = argc > 1 ? argv[1] : "digits";
  const std::string folder = argc > 2 ? argv[2] : MODELS_DIR;
  const at::Tensor images = read_images(argc > 3 ? argv[3] : IMAGES);

  const c10::InferenceMode mode;
  example_project::Model model(name, folder);
  std::printf("%s: %s\n", name.c_str(), model.path().filename().c_str());
  for (const int64_t batch : {8, 1}) {
    std::printf("batch of %d\n", static_cast<int>(batch));
    print_rows(model.run({images.narrow(0, 0, batch)}).at(0));
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
