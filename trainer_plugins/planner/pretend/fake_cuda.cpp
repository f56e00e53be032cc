// What autograd asks of CUDA before it runs a backward on tensors that have a device and no bytes: a guard of cards
// with one stream each, on which work is done when it is asked for, and hooks that say CUDA is built and has no context yet.
// Nothing else of CUDA is here. (c10's NoOpDeviceGuardImpl will not do: its device has the index -1, and autograd keeps
// a list by that index.)
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

// Autograd starts a thread for each when the first backward runs; one without work waits. A process uses one card or,
// if its model is spread over several, as many as MOST_CARDS of request.py.
constexpr c10::DeviceIndex kMostCards = 16;
thread_local c10::DeviceIndex current = 0;

c10::Device card(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index < 0 ? current : index); }
c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, card(device.index())); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return card(current); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = card(current);
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = card(device.index()).index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kMostCards; }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream stream_) const override { return stream(stream_.device()); }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}
  void record(void** /*event*/, const c10::Stream& /*s*/, c10::DeviceIndex /*d*/, c10::EventFlag /*f*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*device*/) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return false; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

// Torch asks its registry for hooks once, while it is imported, so that registering others comes too late: the object
// that it keeps is made one of ours instead. It has no members, is never deleted, and neither are these.
extern "C" void trainer_plugins_fake_cuda() {
  static auto* hooks = new Hooks;
  static_assert(sizeof(Hooks) == sizeof(void*), "hooks with members");
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(kept), static_cast<void*>(hooks), sizeof(Hooks));
}
