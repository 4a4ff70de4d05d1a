// The few operations that a backend must have natively: making, viewing, resizing and reading tensors.
#include "sim.h"

#include <ATen/autocast_mode.h>

namespace sim {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, at::dtype_or_default(dtype));
}

std::vector<int64_t> dense_strides(at::IntArrayRef size) {
  std::vector<int64_t> strides(size.size(), 1);
  for (auto i = static_cast<int64_t>(size.size()) - 2; i >= 0; --i)
    strides[i] = strides[i + 1] * std::max<int64_t>(size[i + 1], 1);
  return strides;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                               at::IntArrayRef stride) {
  std::vector<int64_t> contiguous = dense_strides(size);
  if (stride.size() != size.size()) stride = contiguous;
  size_t needed = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), offset);
  TORCH_CHECK(c10::multiply_integers(size) == 0 || needed <= source.nbytes(), "setStorage: sizes and strides need ",
              needed, " bytes, the storage has ", source.nbytes());
  TORCH_CHECK(source.device() == self.device(), "set_: the storage is on ", source.device(), ", the tensor on ",
              self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_offset(self, std::move(none), 0, {0}, {});
}

at::Tensor copy_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

// .item() waits for the device.
at::Scalar local_scalar(const at::Tensor& self) {
  {
    Locked lock;
    int stream = current_stream_index(self.device().index());
    uint64_t seq = begin_op(stream);
    touch(span_of(self), true, stream, seq, false, "item");
    ++state().count.implicit_syncs;
    host_waits_for(state().streams[stream].clock);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::_local_scalar_dense(cpu_alias(self, cpu_alias_storage(self.storage())));
}

// The words that CUDA has for it: callers and tests match them.
at::Tensor refuse_to_pin(const at::Tensor& self, std::optional<at::Device>) {
  std::string name = c10::toString(self.scalar_type());
  TORCH_CHECK(false, "cannot pin 'torch.npu.", name, "Tensor' only dense CPU tensors can be pinned");
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Locked lock;
  auto block = find_block(state().device_blocks, self.storage().data_ptr().get(), 1);
  if (block) block->recorded.set(stream_index(stream));
}

// Tells `param.data = tensor` that plain tensors of the CPU and of the device may replace each other, as with CUDA.
bool may_shallow_copy(const at::Tensor& self, const at::Tensor& from) {
  auto plain = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && !t.is_quantized() && (t.is_cpu() || t.is_privateuseone());
  };
  if (plain(self) && plain(from)) return true;
  return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned_range(data, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    Locked lock;
    BlockRef block = find_block(state().device_blocks, data, 1);
    TORCH_CHECK(block, "the pointer is not device memory");
    return at::Device(kType, static_cast<c10::DeviceIndex>(block->device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
  // Random numbers are the CPU's, so that seeds give the CPU's results.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const { return at::detail::createCPUGenerator(); }
};

const bool g_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_pin_memory", &refuse_to_pin);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_has_compatible_shallow_copy_type", &may_shallow_copy);
}
// torch.autocast("npu"): the matrix products that matter, everything else as it is.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
// The copy itself looks at these bits: resolving them first would copy, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("_has_compatible_shallow_copy_type", &may_shallow_copy); }
TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("_has_compatible_shallow_copy_type", &may_shallow_copy); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", &may_shallow_copy); }

}  // namespace

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator()->allocate(nbytes);
  size_t kept = std::min(nbytes, storage.nbytes());
  if (kept) std::memcpy(data.get(), storage.data_ptr().get(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size && !format) return self;
  size_t needed = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (c10::multiply_integers(size) && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

}  // namespace sim
