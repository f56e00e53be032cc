"""Conjugate and negative views, as rotary embeddings in complex numbers make them (DeepSeek-V2, Llama 4)."""

import torch


def test_they_have_the_values_of_the_cpu(simgpu) -> None:
    here = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    there = here.to("simgpu")
    assert there.conj().is_conj()
    assert torch.equal(there.conj().cpu(), here.conj().resolve_conj())
    assert torch.equal((there.conj() * there).cpu(), here.conj() * here)
    assert there.conj().imag.is_neg()
    assert torch.equal(there.conj().imag.clone().cpu(), here.conj().imag.clone())
    assert torch.equal(here.conj().to("simgpu").cpu(), here.conj().resolve_conj())


def test_a_product_of_complex_numbers_has_a_gradient(simgpu) -> None:
    gradients = []
    for device in ("cpu", "simgpu"):
        pairs = torch.arange(8.0, device=device).reshape(4, 2).requires_grad_()
        turn = torch.polar(torch.ones(4, device=device), torch.arange(4.0, device=device))
        torch.view_as_real(torch.view_as_complex(pairs) * turn).sum().backward()
        assert pairs.grad is not None
        gradients.append(pairs.grad.cpu())
    assert torch.equal(*gradients)
