// Autocast with the lists of operations that CUDA uses, from ATen/autocast_mode.h. CUDA compiles one wrapper for each
// operation; these work on the interpreter's stack, one for each policy, and compile in a tenth of the time.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "host_alias.h"

namespace simgpu::autocast {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

enum class Policy { kLowerPrecision, kFloat32, kFloat32Output, kWidest };

template <class Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      function(tensor);
    }
  }
}

inline void cast(c10::IValue& value, at::ScalarType dtype) {
  if (value.isTensor()) {
    value = at::autocast::cached_cast(dtype, value.toTensor(), kDeviceType);
  } else if (value.isTensorList()) {
    value = c10::List<at::Tensor>(at::autocast::cached_cast(dtype, value.toTensorVector(), kDeviceType));
  }
}

// softmax, sum and their like: ask the operation for a float32 result, unless the caller asked for a dtype. Where there
// is no such argument to set (sum's is there, prod's too) nothing changes.
inline void ask_for_float32(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  const bool eligible = stack[first].isTensor() && at::autocast::is_eligible(stack[first].toTensor(), kDeviceType);
  for (size_t i = first; eligible && i < stack.size(); ++i) {
    if (op.schema().arguments()[i - first].name() == "dtype" && stack[i].isNone()) {
      stack[i] = at::kFloat;
    }
  }
}

template <Policy policy>
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t first = stack->size() - op.schema().arguments().size();
  if (policy == Policy::kFloat32Output) {
    ask_for_float32(op, *stack, first);
  } else {
    at::ScalarType dtype = at::kFloat;
    if (policy != Policy::kFloat32) {
      dtype = at::autocast::get_autocast_dtype(kDeviceType);
    }
    for (size_t i = first; policy == Policy::kWidest && i < stack->size(); ++i) {
      for_each_tensor((*stack)[i], [&dtype](const at::Tensor& tensor) {
        if (at::autocast::is_eligible(tensor, kDeviceType) && tensor.scalar_type() == at::kFloat) {
          dtype = at::kFloat;
        }
      });
    }
    for (size_t i = first; i < stack->size(); ++i) {
      cast((*stack)[i], dtype);
    }
  }
  op.callBoxed(stack);
}

template <Policy policy>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&run<policy>>();
}

}  // namespace simgpu::autocast

// The lists call their argument with (name) or (name, overload).
#define SIMGPU_NAME_1(name) #name
#define SIMGPU_NAME_2(name, overload) #name "." #overload
#define SIMGPU_NAME_OF(_1, _2, macro, ...) macro
#define SIMGPU_NAME(...) SIMGPU_NAME_OF(__VA_ARGS__, SIMGPU_NAME_2, SIMGPU_NAME_1)(__VA_ARGS__)
#define SIMGPU_LOWER_PRECISION(...) m.impl(SIMGPU_NAME(__VA_ARGS__), kernel<Policy::kLowerPrecision>());
#define SIMGPU_FLOAT32(...) m.impl(SIMGPU_NAME(__VA_ARGS__), kernel<Policy::kFloat32>());
#define SIMGPU_FLOAT32_OUTPUT(...) m.impl(SIMGPU_NAME(__VA_ARGS__), kernel<Policy::kFloat32Output>());
#define SIMGPU_WIDEST(...) m.impl(SIMGPU_NAME(__VA_ARGS__), kernel<Policy::kWidest>());
