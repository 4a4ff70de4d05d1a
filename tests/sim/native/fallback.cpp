// Every operation that has no kernel of its own runs on the CPU, on the device's own memory.
#include "sim.h"

namespace sim {

// A CPU storage over the same bytes. It holds the device storage, so a view that outlives the call stays valid.
c10::Storage cpu_alias_storage(const c10::Storage& storage) {
  auto* holder = new c10::Storage(storage);
  c10::DataPtr data(storage.data_ptr().get(), holder, [](void* p) { delete static_cast<c10::Storage*>(p); },
                    c10::Device(c10::kCPU));
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                            std::move(data), c10::GetAllocator(c10::kCPU), true));
}

at::Tensor cpu_alias(const at::Tensor& tensor, const c10::Storage& storage) {
  c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

namespace {

struct Operand {
  at::Tensor tensor, alias;
  bool write;
};

// One call of one operation: what it uses, and where.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}
  void run();

 private:
  void collect();
  void check_devices() const;
  void start();
  void finish();
  c10::IValue convert(const c10::IValue& value, bool write);
  at::Tensor convert(const at::Tensor& tensor, bool write);
  c10::IValue restore(const c10::IValue& value);
  at::Tensor restore(const at::Tensor& tensor);
  at::Tensor to_device(const at::Tensor& tensor);
  void sync_back(const Operand& operand);

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<Operand> operands_;
  std::vector<std::pair<at::Tensor, bool>> host_;  // CPU operands, and whether they are written
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
  std::optional<c10::Device> device_;
  std::optional<size_t> device_argument_;
  int stream_ = 0;
  uint64_t seq_ = 0;
};

const std::string& name_of(const c10::OperatorHandle& op) { return op.operator_name().name; }

// CUDA takes CPU indices for a device tensor.
bool takes_cpu_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

// Operations whose result's shape or value the host must know.
bool waits_for_device(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::NumberType) return true;
  }
  const auto& name = name_of(op);
  return name == "aten::nonzero" || name == "aten::masked_select" || name.rfind("aten::unique", 0) == 0 ||
         name.rfind("aten::_unique", 0) == 0;
}

at::Tensor Call::convert(const at::Tensor& tensor, bool write) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().type() != kType) {
    host_.emplace_back(tensor, write);
    return tensor;
  }
  if (!device_) device_ = tensor.device();
  auto* key = tensor.storage().unsafeGetStorageImpl();
  auto it = std::find_if(storages_.begin(), storages_.end(), [&](auto& entry) { return entry.first == key; });
  if (it == storages_.end()) it = storages_.emplace(it, key, cpu_alias_storage(tensor.storage()));
  operands_.push_back({tensor, cpu_alias(tensor, it->second), write});
  return operands_.back().alias;
}

c10::IValue Call::convert(const c10::IValue& value, bool write) {
  if (value.isTensor()) return convert(value.toTensor(), write);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(convert(t, write));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<at::Tensor>(convert(*t, write)) : std::nullopt);
    return list;
  }
  return value;
}

void Call::collect() {
  const auto& arguments = op_.schema().arguments();
  size_t begin = stack_->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack_)[begin + i];
    const auto* alias = arguments[i].alias_info();
    if (value.isDevice() && value.toDevice().type() == kType) {
      device_argument_ = begin + i;
      continue;
    }
    value = convert(value, alias && alias->isWrite());
  }
  if (!device_argument_) return;
  if (!device_) device_ = (*stack_)[*device_argument_].toDevice();
  (*stack_)[*device_argument_] = c10::Device(c10::kCPU);
}

void mismatch(const c10::Device& a, const c10::Device& b, const std::string& name) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
              "! (when checking arguments of ", name, ")");
}

void Call::check_devices() const {
  for (const auto& operand : operands_)
    if (operand.tensor.device() != *device_) mismatch(*device_, operand.tensor.device(), name_of(op_));
  bool indices = takes_cpu_indices(name_of(op_));
  for (const auto& [tensor, write] : host_) {
    bool exempt = tensor.is_cpu() && !write && (tensor.dim() == 0 || indices);
    if (!exempt) mismatch(*device_, tensor.device(), name_of(op_));
  }
}

void Call::start() {
  Locked lock;
  stream_ = current_stream_index(device_->index());
  seq_ = begin_op(stream_);
  ++state().count.kernels;
  for (const auto& operand : operands_)
    touch(span_of(operand.tensor), true, stream_, seq_, operand.write, name_of(op_));
  if (!waits_for_device(op_)) return;
  ++state().count.implicit_syncs;
  host_waits_for(state().streams[stream_].clock);
}

// An out= tensor that the CPU kernel resized takes the new shape, and the new bytes if there are any.
void Call::sync_back(const Operand& operand) {
  auto* impl = operand.tensor.unsafeGetTensorImpl();
  const auto& from = operand.alias.storage();
  const auto& to = operand.tensor.storage();
  if (from.data_ptr().get() != to.data_ptr().get()) {
    if (to.nbytes() < from.nbytes()) resize_storage(to, from.nbytes());
    std::memcpy(to.data_ptr().get(), from.data_ptr().get(), from.nbytes());
  }
  if (operand.alias.sizes().equals(impl->sizes()) && operand.alias.strides().equals(impl->strides()) &&
      operand.alias.storage_offset() == impl->storage_offset())
    return;
  impl->set_storage_offset(operand.alias.storage_offset());
  impl->set_sizes_and_strides(operand.alias.sizes(), operand.alias.strides());
}

at::Tensor Call::to_device(const at::Tensor& result) {
  at::Tensor tensor = result.resolve_conj().resolve_neg();
  if (!tensor.is_non_overlapping_and_dense()) tensor = tensor.contiguous();
  c10::DeviceGuard guard(*device_);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  at::Tensor out = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), device_allocator(), keys,
                                                     tensor.scalar_type());
  Span to = span_of(out), from = span_of(tensor);
  if (to.size) std::memcpy(to.ptr, from.ptr, to.size);
  Locked lock;
  touch(to, true, stream_, seq_, true, name_of(op_));
  return out;
}

at::Tensor Call::restore(const at::Tensor& result) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (const auto& operand : operands_)
    if (operand.alias.is_same(result)) return operand.tensor;
  for (const auto& operand : operands_) {
    if (!result.has_storage() || !operand.alias.storage().is_alias_of(result.storage())) continue;
    auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(operand.tensor.storage()),
                                                         operand.tensor.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
    return view;
  }
  for (const auto& entry : host_)
    if (entry.first.is_same(result)) return result;
  return to_device(result);
}

c10::IValue Call::restore(const c10::IValue& value) {
  if (value.isTensor()) return restore(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : value.toTensorVector()) list.push_back(restore(t));
  return list;
}

void Call::finish() {
  for (const auto& operand : operands_)
    if (operand.write) sync_back(operand);
  size_t returns = op_.schema().returns().size();
  for (size_t i = stack_->size() - returns; i < stack_->size(); ++i) (*stack_)[i] = restore((*stack_)[i]);
}

void Call::run() {
  collect();
  TORCH_CHECK(device_, name_of(op_), " was dispatched to the simulated device without naming it");
  if (!device_->has_index()) device_ = c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  check_devices();
  start();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }
  finish();
}

void run_as(const char* name, torch::jit::Stack* stack) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  Call(op, stack).run();
}

// A backend outside torch must bring its own convolution. The schema is that of aten::convolution.
void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_as("aten::convolution", stack);
}

void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  size_t begin = stack->size() - op.schema().arguments().size();
  at::Tensor weight = (*stack)[begin + 2].toTensor();
  bool transposed = (*stack)[begin + 6].toBool();
  int64_t channels = transposed ? weight.size(1) * (*stack)[begin + 8].toInt() : weight.size(0);
  stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(begin) + 3, c10::IValue(std::vector<int64_t>{channels}));
  run_as("aten::convolution_backward", stack);
}

// Without a gradient the whole attention runs as the CPU's own, so that results are equal bit for bit.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                     bool gqa) {
  bool grad = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  bool traced = q.key_set().has(c10::DispatchKey::Python) || k.key_set().has(c10::DispatchKey::Python) ||
                v.key_set().has(c10::DispatchKey::Python) || c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (grad || traced) return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, gqa);
  at::AutoDispatchBelowADInplaceOrView guard;
  torch::jit::Stack stack{q, k, v, mask, dropout, causal, scale, gqa};
  run_as("aten::scaled_dot_product_attention", &stack);
  return stack.back().toTensor();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("scaled_dot_product_attention", &attention);
  // torch has a decomposition of these that a backend gets unless it says otherwise; its last bit differs from the
  // CPU's.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", &attention); }

}  // namespace

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace sim
