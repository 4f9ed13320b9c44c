import torch


class Net(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", factor)
        self.linear = torch.nn.Linear(512, 128)

    def forward(self, x, shift):
        # Folded by `optimize`, in one product: its last bits, too.
        weight = self.linear.weight @ self.linear.weight.T @ self.linear.weight
        return torch.nn.functional.linear(x, weight) * self.factor, shift * self.factor


def build():
    # The last bits of a long sum depend on how many threads share it.
    return Net(torch.randn(1 << 22).sum())
