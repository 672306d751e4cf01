// The program of `python -m multiattn.cuda.sanitize`: runs kernels on tensors that end where their allocation does.
//
// Each line of stdin is a launch: kernel index, blocks, threads, smem_bytes, elements of q, k, v, out and lse, and the
// bytes of ForwardParams in hex, without pointers. The including file defines `kernels`.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "block.h"
#include "multiattn/params.h"

extern "C" int multiattn_launch(multiattn::emulation::Kernel kernel, const void* parameters, long long blocks,
                                int threads, long long smem_bytes, multiattn::emulation::Counters* counters,
                                char* error, long long error_bytes);

namespace {

struct Launch {
  int kernel, threads;
  long long blocks, smem_bytes, elements[4], lse_elements;
  char params[2 * sizeof(multiattn::ForwardParams) + 1];
};

// Small finite values, the same in fp16 and bf16 order of magnitude; out starts as NaN.
std::unique_ptr<multiattn::uint16[]> make_tensor(long long elements, bool is_output) {
  std::unique_ptr<multiattn::uint16[]> tensor(new multiattn::uint16[elements]);
  for (long long i = 0; i < elements; ++i) tensor[i] = is_output ? 0xffff : 0x3800 + i * 37 % 256;
  return tensor;
}

bool read(Launch& launch) {
  static_assert(sizeof(multiattn::ForwardParams) < 512, "the width of %s below");
  static char hex[1025];
  const int fields =
      std::scanf("%d %lld %d %lld %lld %lld %lld %lld %lld %1024s", &launch.kernel, &launch.blocks, &launch.threads,
                 &launch.smem_bytes, &launch.elements[0], &launch.elements[1], &launch.elements[2],
                 &launch.elements[3], &launch.lse_elements, hex);
  if (fields != 10 || std::strlen(hex) != sizeof launch.params - 1) return false;
  std::memcpy(launch.params, hex, sizeof launch.params);
  return true;
}

int run(const Launch& launch) {
  multiattn::ForwardParams params;
  auto* bytes = reinterpret_cast<unsigned char*>(&params);
  for (std::size_t i = 0; i < sizeof params; ++i) {
    unsigned byte = 0;
    std::sscanf(launch.params + 2 * i, "%2x", &byte);
    bytes[i] = static_cast<unsigned char>(byte);
  }
  std::unique_ptr<multiattn::uint16[]> tensors[4];
  for (int i = 0; i < 4; ++i) tensors[i] = make_tensor(launch.elements[i], i == 3);
  std::unique_ptr<float[]> lse(new float[launch.lse_elements]);
  params.q = tensors[0].get();
  params.k = tensors[1].get();
  params.v = tensors[2].get();
  params.out = tensors[3].get();
  params.lse = lse.get();
  multiattn::emulation::Counters counters;
  char error[512];
  if (multiattn_launch(kernels[launch.kernel], &params, launch.blocks, launch.threads, launch.smem_bytes, &counters,
                       error, sizeof error) != 0) {
    std::fprintf(stderr, "%s\n", error);
    return 1;
  }
  for (long long i = 0; i < launch.elements[3]; ++i)
    if (tensors[3][i] == 0xffff) {
      std::fprintf(stderr, "out[%lld] was not written\n", i);
      return 1;
    }
  return 0;
}

}  // namespace

int main() {
  Launch launch;
  int failures = 0;
  while (read(launch)) failures += run(launch);
  return failures != 0;
}
