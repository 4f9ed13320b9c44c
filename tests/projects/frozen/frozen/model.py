import torch
from torch import nn
from torch.nn import functional as F

KINDS = [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Tanh(), nn.LeakyReLU(0.2), nn.Hardtanh(-1, 2)]


class Activations(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.Sequential(*(part for kind in KINDS for part in (nn.Linear(256, 256), kind)))
        self.joined = nn.Linear(256, 256)
        self.convolutions = nn.Sequential(
            *(part for kind in KINDS[:3] for part in (nn.Conv2d(64, 64, 3, padding=1), kind))
        )
        self.added = nn.Conv2d(64, 128, 3, padding=1)

    def forward(self, x, image):
        clamped = self.joined(x).clamp(-1, 2)
        return self.linears(x) + clamped, torch.relu(self.added(self.convolutions(image)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(256, 768)
        self.out = nn.Linear(256, 256)

    def forward(self, x):
        heads = self.project(x).view(x.shape[0], x.shape[1], 12, 64).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, 1)).transpose(1, 2).reshape(x.shape)
        return F.gelu(self.out(y) + x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(128, 128, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]
