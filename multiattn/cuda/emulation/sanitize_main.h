// The program of `python -m multiattn.cuda.sanitize`: runs kernels on tensors that end where their allocation does.
//
// Each line of stdin is a sequence of launches on one parameter struct: its bytes in hex, without pointers; how many
// kernels, and of each its index, blocks, threads, smem_bytes and cluster; how many tensors, and of each its bytes, its
// kind, in how many places of the struct its address is, and these (in tensor maps, too). The including file defines
// `kernels`.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "block.h"

extern "C" int multiattn_launch(multiattn::emulation::Kernel kernel, const void* parameters, long long blocks,
                                int threads, long long smem_bytes, int cluster,
                                multiattn::emulation::Counters* counters, char* error, long long error_bytes);

namespace {

enum Kind { HALVES, FLOATS, OUTPUT, WORKSPACE, ZEROS };  // sanitize.py has the same

struct alignas(64) Params {  // a part of a parameter struct, as aligned as any is
  unsigned char bytes[64];
};

struct Launch {
  int kernel, threads, cluster;
  long long blocks, smem_bytes;
};

struct Tensor {
  std::size_t bytes;
  int kind;
  std::vector<std::size_t> addresses_at;
  std::unique_ptr<unsigned char[]> data;

  // Small finite values, the same in fp16 and bf16 order of magnitude; what a kernel is to write starts as NaN.
  void fill() {
    data.reset(new unsigned char[bytes]);
    std::memset(data.get(), kind == ZEROS ? 0 : 0xff, bytes);
    for (std::size_t i = 0; kind == HALVES && i < bytes / 2; ++i) {
      const std::uint16_t value = 0x3800 + i * 37 % 256;
      std::memcpy(data.get() + 2 * i, &value, 2);
    }
    for (std::size_t i = 0; kind == FLOATS && i < bytes / 4; ++i) {
      const float value = 4.0f;
      std::memcpy(data.get() + 4 * i, &value, 4);
    }
  }

  // The first 16-bit element that is as it was, or -1.
  long long unwritten() const {
    for (std::size_t i = 0; kind == OUTPUT && i < bytes / 2; ++i)
      if (data[2 * i] == 0xff && data[2 * i + 1] == 0xff) return static_cast<long long>(i);
    return -1;
  }
};

int run(std::istringstream& line) {
  std::string hex;
  std::size_t count = 0;
  line >> hex >> count;
  std::vector<Launch> launches(count);
  for (Launch& launch : launches)
    line >> launch.kernel >> launch.blocks >> launch.threads >> launch.smem_bytes >> launch.cluster;
  line >> count;
  std::vector<Tensor> tensors(count);
  for (Tensor& tensor : tensors) {
    line >> tensor.bytes >> tensor.kind >> count;
    tensor.addresses_at.resize(line ? count : 0);
    for (std::size_t& at : tensor.addresses_at) line >> at;
  }
  if (!line) {
    std::fprintf(stderr, "a line that is not understood\n");
    return 1;
  }

  const std::unique_ptr<Params[]> memory(new Params[(hex.size() / 2 + sizeof(Params) - 1) / sizeof(Params)]);
  unsigned char* params = memory[0].bytes;
  for (std::size_t i = 0; i < hex.size() / 2; ++i)
    params[i] = static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  for (Tensor& tensor : tensors) {
    tensor.fill();
    void* pointer = tensor.data.get();
    for (const std::size_t at : tensor.addresses_at) std::memcpy(params + at, &pointer, sizeof pointer);
  }
  for (const Launch& launch : launches) {
    multiattn::emulation::Counters counters;
    char error[512];
    if (multiattn_launch(kernels[launch.kernel], params, launch.blocks, launch.threads, launch.smem_bytes,
                         launch.cluster, &counters, error, sizeof error) != 0) {
      std::fprintf(stderr, "%s\n", error);
      return 1;
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (const long long element = tensors[i].unwritten(); element >= 0) {
      std::fprintf(stderr, "element %lld of tensor %zu was not written\n", element, i);
      return 1;
    }
  return 0;
}

}  // namespace

int main() {
  int failures = 0;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    failures += run(line);
  }
  return failures != 0;
}
