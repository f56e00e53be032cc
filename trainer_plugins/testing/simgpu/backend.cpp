// simgpu: an accelerator in host memory, as torch's PrivateUse1 device. The one translation unit; the headers beside it
// hold one subject each, in the order card, pages, allocator, host_alias, fallback, kernels, device, attention, autocast.
//
// Python talks to it through the C functions at the end, with ctypes: no Python headers are needed to build it, and one
// build serves every Python of the same torch.
#include <ATen/ops/empty.h>

#include <thread>

#include "attention.h"
#include "autocast.h"
#include "collectives.h"
#include "device.h"

namespace {

using namespace simgpu;

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &simgpu::empty);
  m.impl("empty_strided", &simgpu::empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &simgpu::resize);
  m.impl("as_strided", &simgpu::as_strided);
  m.impl("view", &simgpu::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("is_set_to", &simgpu::is_set_to);
  m.impl("convolution_overrideable", &simgpu::convolution);
  m.impl("convolution_backward_overrideable", &simgpu::convolution_backward);
  m.impl("record_stream", &simgpu::record_stream);
  // torch has these for other devices in pieces, with a tensor more than the kernels of CUDA and of the host take.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// copy_ resolves a conjugate or negative view by this copy. If the fallback of these keys resolved the view before it, that
// would be a copy again, and so on until the stack is full.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

#if SIMGPU_TORCH_VERSION < 210  // in torch since 2.10; without it, collectives (which have no autograd) are not found
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
#endif

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using autocast::kernel;
  using autocast::Policy;
  AT_FORALL_LOWER_PRECISION_FP(SIMGPU_LOWER_PRECISION)
  AT_FORALL_FP32(SIMGPU_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMGPU_FLOAT32_OUTPUT)
  AT_FORALL_PROMOTE(SIMGPU_WIDEST)
  m.impl("norm.Scalar", kernel<Policy::kFloat32>());
  m.impl("norm.ScalarOpt_dim", kernel<Policy::kFloat32>());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

// torch registers its collectives for PrivateUse1 itself, to call a backend of that device; replacing them is meant,
// and so the warning about it is not shown.
void register_collectives() {
  static Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static auto* library =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.name.rfind("c10d::", 0) == 0) {
      const std::string short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_collective_on_host>());
    }
  }
}

// ctypes cannot carry C++ exceptions: 0 is success, and the text of an error is kept for simgpu_last_error.
std::string last_error;

}  // namespace

extern "C" {

int simgpu_register(int num_indices) {
  try {
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    register_collectives();
    num_device_indices = num_indices;
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

int simgpu_attach_card(const char* path, const char* process_name) {
  const std::string why_not = device_allocator().card.attach(path, process_name);
  if (!why_not.empty()) last_error = "simgpu: " + why_not;
  return why_not.empty() ? 0 : 1;
}

const char* simgpu_last_error() { return last_error.c_str(); }
void simgpu_fail_at(uint64_t n) { device_allocator().fail_at(n); }
void simgpu_limit(uint64_t num_bytes) { device_allocator().limit(num_bytes); }
void simgpu_expandable(int use) { device_allocator().use_expandable_segments(use != 0); }
// Returns when autograd's device thread has dropped every graph it was given; __init__.py says why that matters.
//
// One more backward is the wait. The queue serves the newest node first, by a count that each thread keeps for itself,
// so the backward of a new thread, whose count begins at 0, comes after all that is left. And it must not come from
// Python, whose backward leaves a Python object (torch/autograd/graph.py: the context) in the graph. It allocates
// nothing.
void simgpu_finish_backward() {
  std::thread([] {
    try {
      at::Tensor leaf = at::empty({0}, at::TensorOptions(kDevice)).set_requires_grad(true);
      leaf.neg().backward(leaf.detach());
    } catch (const std::exception&) {
      // The process is about to end, and nothing depends on this backward.
    }
  }).join();
}

uint64_t simgpu_num_allocations() { return device_allocator().num_allocations(); }
}
