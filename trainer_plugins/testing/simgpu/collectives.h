// The collectives of torch.distributed, c10d::allreduce_ and so on, run by a plain gloo group on aliases of their tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "host_alias.h"

namespace simgpu {

// The result of a collective: gloo's own work, whose tensors are released by the thread that waited for it, as NCCL's
// are. Gloo's thread keeps them until it runs again (ProcessGroupGloo::runLoop), which on a busy machine is now and
// then so late that the caller's next tensors need more of the card than they would.
class Work final : public c10d::Work {
 public:
  Work(c10::intrusive_ptr<c10d::Work> work, std::vector<c10::Storage> aliases)
      : work_(std::move(work)), aliases_(std::move(aliases)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const bool is_done = work_->wait(timeout);  // raises, or says false, while gloo may still write
    if (is_done) {
      for (const c10::Storage& alias : aliases_) {
        alias.set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
      }
      aliases_.clear();
    }
    return is_done;
  }

  // Both give the aliases to somebody else, who may read them after the wait.
  std::vector<at::Tensor> result() override {
    aliases_.clear();
    return work_->result();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    aliases_.clear();
    return work_->getFuture();
  }

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  void synchronize() override { work_->synchronize(); }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return work_->getFutureResult(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<c10::Storage> aliases_;
};

// As run_on_host, but the tensors may be nested lists, and the result goes on writing into the aliases.
inline void run_collective_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostAliases aliases;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    (*stack)[i] = aliases.to_host((*stack)[i]);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& result = (*stack)[i];
    if (result.isCustomClass()) {
      // As torch's class: IValue knows no other.
      c10::intrusive_ptr<c10d::Work> work =
          c10::make_intrusive<Work>(result.toCustomClass<c10d::Work>(), aliases.host_storages());
      result = c10::IValue(std::move(work));
    } else {
      result = aliases.to_device(result);
    }
  }
}

}  // namespace simgpu
