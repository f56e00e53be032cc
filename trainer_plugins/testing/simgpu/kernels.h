// The operations that cannot go through the fallback: those that allocate, that cross devices, and views, which only
// rearrange sizes and strides and are too frequent to take the long way.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/accumulate.h>

#include "fallback.h"

namespace simgpu {

// How many device indices are accepted: as many as there are ranks on this machine, all of which name this process's
// one card, because libraries write simgpu:LOCAL_RANK as they would write cuda:LOCAL_RANK.
inline std::atomic<int> num_device_indices{1};

inline void check_device(std::optional<c10::Device> device) {
  TORCH_CHECK(
      !device || device->index() < num_device_indices, "simgpu error: invalid device ordinal ",
      static_cast<int>(device->index()), ", this process has ", num_device_indices.load());
}

inline const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

inline at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
    std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  check_device(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), kDeviceKeys, c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/) {
  check_device(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(), kDeviceKeys,
      c10::dtype_or_default(dtype));
}

// One of the two is on this device, the other here or on the host.
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  at::AutoDispatchBelowADInplaceOrView guard;
  HostAliases aliases;
  aliases.to_host(target).copy_(aliases.to_host(source));
  return target;
}

inline void grow_storage(c10::StorageImpl& storage, size_t num_bytes) {
  if (num_bytes > storage.nbytes()) {
    c10::DataPtr grown = device_allocator().allocate(num_bytes);
    if (storage.nbytes() > 0) {
      std::memcpy(grown.get(), storage.data(), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(num_bytes);
  }
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() != sizes) {
    grow_storage(
        *self.storage().unsafeGetStorageImpl(),
        at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset()));
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  if (format && *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (on_device(target)) {
    resize(target, source.sym_sizes(), std::nullopt);
  } else {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  HostAliases aliases;
  return at::native::_local_scalar_dense_cpu(aliases.to_host(self));
}

inline at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  } else {
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto num_elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(num_elements)}, {});
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {c10::SymInt(0)}, {});
}

// torch chooses a convolution by the device and leaves that of a foreign one to these two.
inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView guard;
  HostAliases aliases;
  const auto host_bias = bias ? std::optional<at::Tensor>(aliases.to_host(*bias)) : std::nullopt;
  return aliases.to_device(at::convolution(
      aliases.to_host(input), aliases.to_host(weight), host_bias, stride, padding, dilation, transposed, output_padding,
      groups));
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> output_mask) {
  at::AutoDispatchBelowADInplaceOrView guard;
  HostAliases aliases;
  const int64_t num_outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      aliases.to_host(grad_output), aliases.to_host(input), aliases.to_host(weight), at::IntArrayRef({num_outputs}),
      stride, padding, dilation, transposed, output_padding, groups, output_mask);
  return {aliases.to_device(grad_input), aliases.to_device(grad_weight), aliases.to_device(grad_bias)};
}

inline void record_stream(at::Tensor& /*self*/, at::Stream /*stream*/) {}  // there is one stream

// Whether `parameter.data = moved` may be: torch lists the dense devices by name, without this one. Module.to would
// make new parameters then, and tied weights would come apart on the way, as they do on no card.
inline bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (tensor.is_cpu() || on_device(tensor));
  };
  return is_dense(self) && is_dense(from);
}

inline bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

}  // namespace simgpu
