// The compiled models of a package for C++ programs: picks the file for this CPU, hands over external constants, and
// checks every call as the package's Python module does. Header-only; needs C++17 and libtorch, nothing else.
//
//     #include <example_project/models.h>
//
//     example_project::Model digits("digits", "/path/to/example_project");  // the folder that has _models.json
//     std::vector<at::Tensor> logits = digits.run({image});
//
// `find_package(example_project CONFIG REQUIRED)` gives that folder as `example_project_MODELS_DIR`, and
// `example_project::models` to link with. What a model takes is written in the CMake file and, for programs, in
// `_models.json`. A program need not be compiled again for another build of the wheel: all is read from that file.
//
// Written for torch 2.13: AOTIModelPackageLoader (torch/csrc/inductor/aoti_package/model_package_loader.h) loads and
// runs the files; at::cpu::get_cpu_capabilities (ATen/cpu/Utils.h) says what the CPU can do.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cpu/Utils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_file.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

// The same in the headers of all packages, whichever versions they are built with, and so one lock for the whole program.
#ifndef HATCH_AOTI_LOADING_MUTEX
#define HATCH_AOTI_LOADING_MUTEX
namespace hatch_aoti_loading {

/// PyTorch's loader is not made for several threads that construct one at the same time, whichever packages their
/// models are of (triton-inference-server/pytorch_backend#205).
inline std::mutex& mutex() {
  static std::mutex shared;
  return shared;
}

}  // namespace hatch_aoti_loading
#endif

namespace hatch_aoti {

/// A model cannot be loaded here. `what()` says why and what to do.
class LoadError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A model cannot compute with the values that it was given, such as an index out of range or a division by zero;
/// eager raises for the same. `what()` names the model and says which. The model can be called again.
class RunError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

/// A JSON value (RFC 8259), read only. Whole numbers are exact; all others are doubles.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  /// Read a text. Throws std::invalid_argument if it is no JSON.
  static Json parse(std::string_view text) {
    Reader reader{text};
    Json value = reader.value();
    reader.end();
    return value;
  }

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool boolean() const { return get<bool>("a boolean"); }
  int64_t integer() const { return get<int64_t>("a whole number"); }
  const std::string& string() const { return get<std::string>("a string"); }
  const Array& array() const { return get<Array>("an array"); }
  const Object& object() const { return get<Object>("an object"); }

  /// Return a member of an object. Throws std::invalid_argument if it has none of that name.
  const Json& operator[](std::string_view key) const {
    const auto found = object().find(key);
    if (found == object().end()) {
      throw std::invalid_argument("it has no \"" + std::string(key) + "\"");
    }
    return found->second;
  }

 private:
  template <typename T>
  const T& get(const char* expected) const {
    if (const T* held = std::get_if<T>(&value_)) {
      return *held;
    }
    throw std::invalid_argument(std::string("it does not have ") + expected + " where one is expected");
  }

  struct Reader {
    std::string_view text;
    size_t at = 0;

    [[noreturn]] void fail() const { throw std::invalid_argument("no JSON at byte " + std::to_string(at)); }

    char peek() {
      at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
      return at < text.size() ? text[at] : '\0';
    }

    bool skip(char wanted) {
      const bool there = peek() == wanted && at < text.size();
      at += there ? 1 : 0;
      return there;
    }

    void need(char wanted) {
      if (!skip(wanted)) {
        fail();
      }
    }

    void end() {
      peek();
      if (at != text.size()) {
        fail();
      }
    }

    Json value() {
      Json result;
      switch (peek()) {
        case '{':
          result.value_ = members();
          break;
        case '[':
          result.value_ = items();
          break;
        case '"':
          result.value_ = quoted();
          break;
        case 't':
          word("true");
          result.value_ = true;
          break;
        case 'f':
          word("false");
          result.value_ = false;
          break;
        case 'n':
          word("null");
          break;
        default:
          number(result);
      }
      return result;
    }

    Object members() {
      Object result;
      need('{');
      if (skip('}')) {
        return result;
      }
      do {
        peek();
        std::string key = quoted();
        need(':');
        result.insert_or_assign(std::move(key), value());
      } while (skip(','));
      need('}');
      return result;
    }

    Array items() {
      Array result;
      need('[');
      if (skip(']')) {
        return result;
      }
      do {
        result.push_back(value());
      } while (skip(','));
      need(']');
      return result;
    }

    void word(std::string_view wanted) {
      if (text.substr(at, wanted.size()) != wanted) {
        fail();
      }
      at += wanted.size();
    }

    void number(Json& result) {
      const size_t length = std::min(text.find_first_not_of("+-.0123456789eE", at), text.size()) - at;
      const std::string digits(text.substr(at, length));
      char* stop = nullptr;
      if (digits.find_first_of(".eE") == std::string::npos) {
        result.value_ = static_cast<int64_t>(std::strtoll(digits.c_str(), &stop, 10));
      } else {
        result.value_ = std::strtod(digits.c_str(), &stop);
      }
      if (digits.empty() || *stop != '\0') {
        fail();
      }
      at += length;
    }

    std::string quoted() {
      std::string result;
      need('"');
      while (at < text.size() && text[at] != '"') {
        if (text[at] != '\\') {
          result += text[at++];
          continue;
        }
        ++at;
        constexpr std::string_view letters = "\"\\/bfnrt";
        constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
        const char letter = at < text.size() ? text[at++] : '\0';
        const size_t known = letters.find(letter);
        if (letter == 'u') {
          append(result, code_point());
        } else if (letter != '\0' && known != std::string_view::npos) {
          result += meanings[known];
        } else {
          fail();
        }
      }
      if (at >= text.size()) {
        fail();
      }
      ++at;
      return result;
    }

    uint32_t code_unit() {
      const std::string digits(text.substr(std::min(at, text.size()), 4));
      char* stop = nullptr;
      const auto unit = static_cast<uint32_t>(std::strtoul(digits.c_str(), &stop, 16));
      if (digits.size() != 4 || *stop != '\0') {
        fail();
      }
      at += 4;
      return unit;
    }

    uint32_t code_point() {
      const uint32_t high = code_unit();
      if (high < 0xD800 || high > 0xDBFF || text.substr(at, 2) != "\\u") {
        return high;
      }
      at += 2;
      return 0x10000 + ((high - 0xD800) << 10) + ((code_unit() - 0xDC00) & 0x3FF);
    }

    static void append(std::string& result, uint32_t point) {  // as UTF-8, RFC 3629
      const auto byte = [&](uint32_t bits) { result += static_cast<char>(bits); };
      const auto tail = [&](int shift) { byte(0x80 | ((point >> shift) & 0x3F)); };
      if (point < 0x80) {
        byte(point);
      } else if (point < 0x800) {
        byte(0xC0 | (point >> 6));
        tail(0);
      } else if (point < 0x10000) {
        byte(0xE0 | (point >> 12));
        tail(6);
        tail(0);
      } else {
        byte(0xF0 | (point >> 18));
        tail(12);
        tail(6);
        tail(0);
      }
    }
  };

  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
};

/// The size of a dimension: `plus` + the sum of factor * dim over `terms`.
struct Size {
  std::vector<std::pair<int64_t, std::string>> terms;
  int64_t plus = 0;

  std::string str() const {
    std::string text;
    for (const auto& [factor, dim] : terms) {
      text += (text.empty() ? "" : " + ") + (factor == 1 ? "" : std::to_string(factor) + "*") + dim;
    }
    if (terms.empty()) {
      return std::to_string(plus);
    }
    return plus == 0 ? text : text + (plus < 0 ? " - " : " + ") + std::to_string(std::abs(plus));
  }
};

/// A tensor that compiled code is given; `place` is its number among the tensors that the code takes.
struct Input {
  std::string path;
  std::string dtype;
  at::ScalarType type = at::kFloat;
  std::vector<Size> shape;
  std::vector<int64_t> order;  // of the dimensions in memory, outermost first; empty for row-major
  at::Device device = at::kCPU;
  bool changed = false;
  size_t place = 0;

  std::string str() const {
    std::string text = dtype + "[";
    for (const Size& size : shape) {
      text += (&size == &shape.front() ? "" : ", ") + size.str();
    }
    return text + "]";
  }
};

/// What a model takes, as far as calls from C++ need it.
struct Signature {
  std::vector<Input> inputs;
  std::map<std::string, std::pair<int64_t, int64_t>> dims;  // the smallest and largest size of each named dimension
  std::vector<size_t> shared;  // results that are the model's own memory
  bool keeps_state = false;
};

inline std::vector<int64_t> integers(const Json& list) {
  std::vector<int64_t> result;
  for (const Json& item : list.array()) {
    result.push_back(item.integer());
  }
  return result;
}

inline at::ScalarType scalar_type(const std::string& name) {
  const auto& known = c10::getStringToDtypeMap();
  const auto found = known.find(name);
  if (found == known.end()) {
    throw std::invalid_argument("this torch has no dtype " + name);
  }
  return found->second;
}

inline void read_inputs(const Json& node, std::vector<Input>& inputs) {
  const std::string& kind = node["class"].string();
  if (kind == "Group") {
    for (const Json& item : node["items"].array()) {
      read_inputs(item, inputs);
    }
  } else if (kind == "TensorInput") {
    Input input;
    input.path = node["path"].string();
    input.dtype = node["dtype"].string();
    input.type = scalar_type(input.dtype);
    input.device = at::Device(node["device"].string());
    input.changed = node["changed"].boolean();
    input.order = integers(node["order"]);
    for (const Json& item : node["shape"].array()) {
      Size size{{}, item["plus"].integer()};
      for (const Json& term : item["terms"].array()) {
        size.terms.emplace_back(term.array().at(0).integer(), term.array().at(1).string());
      }
      input.shape.push_back(std::move(size));
    }
    inputs.push_back(std::move(input));
  }
}

inline void read_shared_results(const Json& node, std::vector<size_t>& shared) {
  const std::string& kind = node["class"].string();
  if (kind == "Group") {
    for (const Json& item : node["items"].array()) {
      read_shared_results(item, shared);
    }
  } else if (kind == "TensorOutput" && !node["state"].string().empty()) {
    shared.push_back(static_cast<size_t>(node["index"].integer()));
  }
}

inline Signature read_signature(const Json& json) {
  Signature signature;
  for (const Json& parameter : json["parameters"].array()) {
    read_inputs(parameter["node"], signature.inputs);
  }
  const std::vector<int64_t> order = integers(json["order"]);
  for (size_t place = 0; place < signature.inputs.size(); ++place) {
    signature.inputs[place].place = order.empty() ? place : static_cast<size_t>(order.at(place));
  }
  for (const Json& dim : json["dims"].array()) {
    const bool open = dim["max"].is_null();
    const int64_t most = open ? std::numeric_limits<int64_t>::max() : dim["max"].integer();
    signature.dims[dim["name"].string()] = {dim["min"].integer(), most};
  }
  read_shared_results(json["output"], signature.shared);
  signature.keeps_state = !json["state"].array().empty();
  return signature;
}

inline std::string described(const at::Tensor& tensor) {
  std::string text(c10::getDtypeNames(tensor.scalar_type()).first);
  text += "[";
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    text += (dimension == 0 ? "" : ", ") + std::to_string(tensor.size(dimension));
  }
  return text + "]";
}

/// Refuse a tensor of another dtype or rank, or on another device than the `device` that the model was loaded on.
inline void check_tensor(
    const std::string& model, const Input& input, const at::Device& device, const at::Tensor& given) {
  const std::string start = model + ": " + input.path + " must be ";
  if (!given.defined()) {
    throw std::invalid_argument(start + "a tensor " + input.str() + ", got an undefined one");
  }
  if (given.layout() != at::kStrided) {
    throw std::invalid_argument(start + "a tensor " + input.str() + ", stored densely");
  }
  if (given.scalar_type() != input.type || given.dim() != static_cast<int64_t>(input.shape.size())) {
    throw std::invalid_argument(start + "a tensor " + input.str() + ", got " + described(given));
  }
  const at::Device& wanted = input.device.is_cpu() ? input.device : device;
  if (given.device() != wanted) {
    throw std::invalid_argument(start + "on " + wanted.str() + ", got a tensor on " + given.device().str());
  }
}

/// Refuse sizes that are not the compiled ones, out of range, or at odds with each other.
inline void check_sizes(const std::string& model, const Signature& signature, const std::vector<at::Tensor>& given) {
  struct Spot {
    const Input* input;
    const at::Tensor* tensor;
    int64_t dimension;
    const Size* size;
  };
  std::vector<Spot> spots;
  for (size_t number = 0; number < given.size(); ++number) {
    const Input& input = signature.inputs[number];
    for (size_t dimension = 0; dimension < input.shape.size(); ++dimension) {
      spots.push_back({&input, &given[number], static_cast<int64_t>(dimension), &input.shape[dimension]});
    }
  }
  // Bare dims define their size for all others, so they come first; then expressions of one dim.
  std::stable_sort(spots.begin(), spots.end(), [](const Spot& a, const Spot& b) {
    const auto rank = [](const Size& size) {
      return std::tuple(size.terms.size(), size.terms.empty() ? 0 : size.terms.front().first, size.plus != 0);
    };
    return rank(*a.size) < rank(*b.size);
  });
  std::map<std::string, int64_t> sizes;
  for (const auto& [input, tensor, dimension, size] : spots) {
    const int64_t got = tensor->size(dimension);
    const auto refuse = [&, &input = input, &tensor = tensor, &dimension = dimension](const std::string& why) {
      throw std::invalid_argument(
          model + ": " + input->path + " must be " + input->str() + ", got " + described(*tensor) + ": dimension " +
          std::to_string(dimension) + " is " + std::to_string(got) + ", " + why);
    };
    if (size->terms.size() == 1 && sizes.find(size->terms.front().second) == sizes.end()) {
      const auto& [factor, dim] = size->terms.front();
      const auto& [least, most] = signature.dims.at(dim);
      const int64_t solved = (got - size->plus) / factor;
      if (solved * factor + size->plus != got) {
        refuse("which is not " + size->str() + " for any " + dim);
      }
      if (solved < least || solved > most) {
        const bool open = most == std::numeric_limits<int64_t>::max();
        const std::string range = open ? "at least " : "from ";
        const std::string end = open ? "" : " to " + std::to_string(most);
        refuse("but " + dim + " must be " + range + std::to_string(least) + end);
      }
      sizes[dim] = solved;
    } else {
      int64_t want = size->plus;
      for (const auto& [factor, dim] : size->terms) {
        want += factor * sizes.at(dim);
      }
      if (got != want) {
        refuse("must be " + std::to_string(want));
      }
    }
  }
}

/// Return a tensor as compiled code reads it: dimensions in the compiled order, no lazy conjugate or sign.
inline at::Tensor lay_out(const Input& input, const at::Tensor& given) {
  const at::Tensor plain = given.detach().resolve_conj().resolve_neg();
  if (input.order.empty()) {
    return plain.contiguous();
  }
  std::vector<int64_t> back(input.order.size());
  for (size_t place = 0; place < back.size(); ++place) {
    back[static_cast<size_t>(input.order[place])] = static_cast<int64_t>(place);
  }
  return plain.permute(input.order).contiguous().permute(back);
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file.is_open() || file.bad()) {
    throw LoadError(path.string() + " cannot be read. Is it the folder of an installed package?");
  }
  return text;
}

using Constants = std::unordered_map<std::string, at::Tensor>;

/// Return a model's constants from a .safetensors file: views of the file, which is mapped into memory.
///
/// The file's metadata has an index for each model, from the names that compiled code uses to tensors with their dtype,
/// shape and order of dimensions in memory (hatch_aoti/artifact/constants_file.py).
inline Constants map_constants(const std::filesystem::path& path, const std::string& model) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    throw LoadError(model + ": " + path.string() + " is missing. Reinstall the package that contains it.");
  }
  try {
    const auto file_size = static_cast<int64_t>(std::filesystem::file_size(path));
    uint64_t header_size = 0;
    for (int shift = 0; shift < 64; shift += 8) {  // little-endian, whatever this machine is
      header_size |= static_cast<uint64_t>(static_cast<unsigned char>(file.get())) << shift;
    }
    if (!file || header_size > static_cast<uint64_t>(file_size)) {
      throw std::invalid_argument("it is shorter than it should be");
    }
    std::string text(header_size, '\0');
    file.read(text.data(), static_cast<std::streamsize>(header_size));
    const Json header = Json::parse(text);
    const Json index = Json::parse(header["__metadata__"][model].string());
    // Private to the process as soon as it is written to, and shared as long as it is not.
    const at::Tensor mapped = at::from_file(path.string(), /*shared=*/false, file_size, at::kByte);
    Constants constants;
    for (const auto& [name, entry] : index.object()) {
      const std::vector<int64_t> offsets = integers(header[entry["tensor"].string()]["data_offsets"]);
      const std::vector<int64_t> shape = integers(entry["shape"]);
      const std::vector<int64_t> order = integers(entry["order"]);
      const int64_t start = 8 + static_cast<int64_t>(header_size) + offsets.at(0);
      if (start - offsets.at(0) + offsets.at(1) > file_size) {
        throw std::invalid_argument("it is shorter than it should be");
      }
      std::vector<int64_t> strides(shape.size());
      int64_t stride = 1;
      for (auto dimension = order.rbegin(); dimension != order.rend(); ++dimension) {
        strides.at(static_cast<size_t>(*dimension)) = stride;
        stride *= std::max<int64_t>(shape.at(static_cast<size_t>(*dimension)), 1);
      }
      at::Tensor tensor = at::empty({0}, scalar_type(entry["dtype"].string()));
      tensor.set_(mapped.storage(), start / static_cast<int64_t>(tensor.itemsize()), shape, strides);
      constants.emplace(name, std::move(tensor));
    }
    return constants;
  } catch (const std::exception& error) {
    throw LoadError(model + ": " + path.string() + " is damaged (" + error.what() + "). Reinstall the package.");
  }
}

/// Return the major and minor number of a version, so that they can be compared.
inline std::pair<int, int> numbers(const std::string& version) {
  std::istringstream text(version);
  int major = 0;
  int minor = 0;
  char point = '\0';
  text >> major >> point >> minor;
  return {major, minor};
}

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Return the id that is in an archive; an empty one if there is none. Throws what PyTorch's reader does for a file that
/// is no archive. Nothing of it is unpacked or run.
inline std::string archive_id(const std::filesystem::path& path) {
  caffe2::serialize::PyTorchStreamReader reader(path.string());
  const std::string record = ".data/serialization_id";
  if (!reader.hasRecord(record)) {
    return "";
  }
  const auto [data, size] = reader.getRecord(record);
  return {static_cast<const char*>(data.get()), size};
}

constexpr const char* system_name =
#if defined(__APPLE__)
    "darwin";
#elif defined(__linux__)
    "linux";
#else
    "an unknown system";
#endif

constexpr const char* machine_name =
#if defined(__x86_64__)
    "x86_64";
#elif defined(__aarch64__) && defined(__APPLE__)
    "arm64";
#elif defined(__aarch64__)
    "aarch64";
#else
    "an unknown machine";
#endif

}  // namespace detail

/// How PyTorch's loader is to load a model; its defaults are PyTorch's.
struct Options {
  bool run_single_threaded = false;       ///< leave out the synchronisation between threads: one caller at a time
  size_t num_runners = 1;                 ///< calls that run at the same time
  at::DeviceIndex device_index = -1;      ///< -1: the device that is current when the model is loaded; 1: cuda:1
};

/// A compiled model. Loading takes milliseconds; calls may come from several threads.
class Model {
 public:
  /// Load the model `name` of the package in `folder`: the best of its files that this CPU can run.
  ///
  /// Throws LoadError if there is no such model, if this machine, its CPU or the torch that the program was compiled
  /// with cannot run it, if there is no GPU for a model that needs one, or if a file is missing or damaged. No code of
  /// the model runs before that is known. Throws std::invalid_argument for a device_index that makes no sense.
  explicit Model(std::string name, const std::filesystem::path& folder, const Options& options = {})
      : name_(std::move(name)) {
    const detail::Json manifest = read_manifest(folder);
    const detail::Json& model = manifest["models"][name_];
    const detail::Json& artifact = choose(model);
    path_ = folder / artifact["file"].string();
    signature_ = detail::read_signature(model["signature"]);
    if (!std::filesystem::is_regular_file(path_)) {
      throw LoadError(name_ + ": " + path_.string() + " is missing. Reinstall the package that contains it.");
    }
    check_operators(model);
    device_ = choose_device(model["device"].string(), options.device_index);
    const c10::OptionalDeviceGuard guard = current();  // loading would change which GPU is current
    const std::lock_guard<std::mutex> one_at_a_time(hatch_aoti_loading::mutex());
    try {
      const auto id = artifact.object().find("id");  // older wheels have none
      if (id != artifact.object().end() && detail::archive_id(path_) != id->second.string()) {
        throw LoadError(
            name_ + ": " + path_.string() + " is not the file that _models.json describes: it is of another build, or " +
            "of another model. Reinstall the package.");
      }
      loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
          path_.string(), artifact["entry"].string(), options.run_single_threaded, options.num_runners, device_.index());
    } catch (const LoadError&) {
      throw;
    } catch (const std::exception& error) {
      throw LoadError(
          name_ + ": torch " TORCH_VERSION " cannot load " + path_.string() + ", which torch " +
          artifact["toolchain"]["torch"].string() + " compiled: " + detail::first_line(error.what()));
    }
    if (model["external_constants"].boolean()) {
      // A model that writes into its constants, or runs on another device, gets a copy.
      const bool share = device_.is_cpu() && !signature_.keeps_state;
      constants_ = detail::map_constants(folder / manifest["constants_file"]["file"].string(), name_);
      loader_->load_constants(constants_, false, true, share, !share);
    }
  }

  /// Run the model on the tensors of forward's parameters, in their order; values that were compiled in are left out.
  ///
  /// Returns the tensors that the compiled code answers with, in its order. Tensors that are laid out otherwise than
  /// the code needs are copied first. Throws std::invalid_argument, naming the parameter, for a wrong number of
  /// tensors, a wrong dtype, device or size, and RunError for values that cannot be computed with. No gradients are
  /// tracked.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    if (inputs.size() != signature_.inputs.size()) {
      throw std::invalid_argument(
          name_ + ": takes " + std::to_string(signature_.inputs.size()) + " tensors, got " +
          std::to_string(inputs.size()));
    }
    for (size_t number = 0; number < inputs.size(); ++number) {
      detail::check_tensor(name_, signature_.inputs[number], device_, inputs[number]);
    }
    detail::check_sizes(name_, signature_, inputs);

    const at::NoGradGuard no_gradients;
    const c10::OptionalDeviceGuard guard = current();  // the loader takes its stream
    std::vector<at::Tensor> laid_out(inputs.size());
    for (size_t number = 0; number < inputs.size(); ++number) {
      const detail::Input& input = signature_.inputs[number];
      laid_out.at(input.place) = detail::lay_out(input, inputs[number]);
    }
    // Sets the number of threads up in this thread, as eager's loops do; compiled ones ask OpenMP, which has a default of
    // its own for each thread (pytorch/pytorch#37259).
    at::get_num_threads();
    std::vector<at::Tensor> results;
    try {
      results = loader_->run(laid_out);
    } catch (const std::exception& error) {
      throw RunError(name_ + ": " + detail::first_line(error.what()));
    }
    for (size_t number = 0; number < inputs.size(); ++number) {
      const detail::Input& input = signature_.inputs[number];
      if (input.changed && laid_out[input.place].data_ptr() != inputs[number].data_ptr()) {
        inputs[number].copy_(laid_out[input.place]);
      }
    }
    for (const size_t number : signature_.shared) {
      results.at(number) = results.at(number).clone();
    }
    return results;
  }

  /// The compiled file that was chosen for this CPU.
  const std::filesystem::path& path() const { return path_; }

  /// PyTorch's own object, which checks nothing.
  torch::inductor::AOTIModelPackageLoader& loader() { return *loader_; }

 private:
  /// Return what is in `_models.json`; it has this model.
  detail::Json read_manifest(const std::filesystem::path& folder) const {
    const std::filesystem::path manifest = folder / "_models.json";
    const std::string text = detail::read_file(manifest);
    try {
      detail::Json json = detail::Json::parse(text);
      const detail::Json::Object& models = json["models"].object();
      if (models.find(name_) != models.end()) {
        return json;
      }
      std::string names;
      for (const auto& [known, unused] : models) {
        names += (names.empty() ? "" : ", ") + known;
      }
      throw LoadError("no model \"" + name_ + "\" in " + folder.string() + "; there are: " + names);
    } catch (const std::invalid_argument& error) {
      throw LoadError(manifest.string() + " is damaged (" + error.what() + "). Reinstall the package.");
    }
  }

  /// Refuse a model that calls custom operators which nothing in this program registers (pytorch/pytorch#145394).
  void check_operators(const detail::Json& model) const {
    const detail::Json::Array& operators = model["operators"].array();
    if (operators.empty()) {
      return;
    }
    std::vector<std::string> known;
    for (const c10::OperatorName& operator_name : c10::Dispatcher::singleton().getAllOpNames()) {
      known.push_back(c10::toString(operator_name));
    }
    for (const detail::Json& needed : operators) {
      if (std::find(known.begin(), known.end(), needed.string()) == known.end()) {
        throw LoadError(
            name_ + " calls the operator " + needed.string() + ", which nothing in this program registers. Link the "
            "library that has it, or load it with dlopen, before the model.");
      }
    }
  }

  /// Return the device to load on, the current one for -1. Whether a GPU runs the kernels is for its driver to say: what
  /// it can do is not to be had without CUDA's own headers.
  at::Device choose_device(const std::string& kind, at::DeviceIndex index) const {
    if (kind == "cpu") {
      if (index != -1) {
        throw std::invalid_argument(
            name_ + ": device_index must be -1, since the model was compiled for the CPU; got " +
            std::to_string(index));
      }
      return at::kCPU;
    }
    const auto count = at::getNumGPUs();
    if (count == 0) {
      throw LoadError(
          name_ + " was compiled for NVIDIA GPUs, and torch finds none: the torch of this program is built without "
          "CUDA, or there is no GPU, no driver (nvidia-smi), or CUDA_VISIBLE_DEVICES hides it.");
    }
    if (index < -1) {
      throw std::invalid_argument(
          name_ + ": device_index must be the number of a GPU, or -1 for the current one; got " +
          std::to_string(index));
    }
    if (index >= static_cast<int64_t>(count)) {
      throw LoadError(
          name_ + ": there is no cuda:" + std::to_string(index) + ": torch finds " + std::to_string(count) +
          " GPUs here.");
    }
    return index == -1 ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice() : at::Device(at::kCUDA, index);
  }

  /// Make the model's GPU the current one, for as long as the result lives; nothing for the CPU.
  c10::OptionalDeviceGuard current() const {
    return device_.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(device_);
  }

  /// Return the best artifact that this machine can run; the best is listed first.
  const detail::Json& choose(const detail::Json& model) const {
    const detail::Json::Array& artifacts = model["artifacts"].array();
    const detail::Json& least = artifacts.at(artifacts.size() - 1);
    const std::string& built = least["toolchain"]["torch"].string();
    const std::string system = least["target"]["system"].string();
    const std::string machine = least["target"]["machine"].string();
    if (system != detail::system_name || machine != detail::machine_name) {
      throw LoadError(
          name_ + " was compiled for " + system + " on " + machine + "; this is " + detail::system_name + " on " +
          detail::machine_name + ". Install a wheel that was built for this platform.");
    }
    if (detail::numbers(TORCH_VERSION) < detail::numbers(built)) {
      const auto [major, minor] = detail::numbers(built);
      throw LoadError(
          name_ + " was compiled with torch " + built + " and needs torch " + std::to_string(major) + "." +
          std::to_string(minor) + " or newer; this program was compiled with torch " TORCH_VERSION ". Upgrade it.");
    }
    const auto able = at::cpu::get_cpu_capabilities();
    const auto lacking = [&](const detail::Json& artifact) {
      std::string missing;
      for (const detail::Json& feature : artifact["target"]["features"].array()) {
        const auto found = able.find(feature.string());
        if (found == able.end() || !found->second.isBool() || !found->second.toBool()) {
          missing += (missing.empty() ? "" : ", ") + feature.string();
        }
      }
      return missing;
    };
    for (const detail::Json& artifact : artifacts) {
      if (lacking(artifact).empty()) {
        return artifact;
      }
    }
    const auto cpu = able.find("cpu_name");
    const bool named = cpu != able.end() && cpu->second.isString() && !cpu->second.toStringRef().empty();
    const std::string cpu_name = named ? cpu->second.toStringRef() : machine;
    throw LoadError(
        name_ + " needs " + least["target"]["name"].string() + " (" + least["target"]["description"].string() +
        "); this CPU (" + cpu_name + ") lacks " + lacking(least) + ". Use a wheel built for a lower target.");
  }

  std::string name_;
  std::filesystem::path path_;
  at::Device device_ = at::kCPU;
  detail::Signature signature_;
  detail::Constants constants_;  // the loader points into these, so they go after it
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
};

}  // namespace hatch_aoti
