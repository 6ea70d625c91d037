"""Trains a ResNet with batch norm on images.pt and labels.pt, in the size of CIFAR's.

$ python plain.py images --epochs 2
"""

import argparse
import os
import time
from enum import Enum

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from varuna_core import Varuna, cut_before, with_loss

parser = argparse.ArgumentParser(description="Training of a ResNet")
parser.add_argument("data", metavar="DIR", help="path to dataset")
parser.add_argument("--epochs", default=2, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=16, type=int, metavar="N")
parser.add_argument("--accumulate", default=4, type=int, help="parts of a batch, one by one")
parser.add_argument("--lr", default=0.01, type=float, metavar="LR")
parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
parser.add_argument("--wd", default=1e-4, type=float, metavar="W")
parser.add_argument("-p", "--print-freq", default=1, type=int, metavar="N")
parser.add_argument("--resume", default="", type=str, metavar="PATH")
parser.add_argument("--seed", default=0, type=int)


def conv3x3(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, 3, stride=stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(2, 1, 1), num_classes=10):
        super().__init__()
        self.inplanes = 8
        self.conv1 = conv3x3(3, self.inplanes)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._make_layer(8, layers[0])
        self.layer2 = self._make_layer(16, layers[1], stride=2)
        self.layer3 = self._make_layer(32, layers[2], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(32, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride=1):
        layers = []
        for number in range(blocks):
            layers.append(BasicBlock(self.inplanes, planes, stride if number == 0 else 1))
            self.inplanes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")  # of batches, which Varuna moves

    model = cut_before(ResNet(), "layer?.*", "avgpool")
    criterion = nn.CrossEntropyLoss().to(device)
    sample = [torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.long)]
    model = Varuna(with_loss(model, criterion), dummy_inputs=sample)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd
    )
    model.set_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model.set_scheduler(scheduler)
    model.save_on_signal()

    train_dataset, val_dataset = (
        TensorDataset(
            torch.load(os.path.join(args.data, split, "images.pt")),
            torch.load(os.path.join(args.data, split, "labels.pt")),
        )
        for split in ("train", "val")
    )
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size)
    steps_per_epoch = len(train_dataset) // args.batch_size
    start_epoch = model.load_checkpoint(missing_ok=True) // steps_per_epoch

    for epoch in range(start_epoch, args.epochs):
        shuffle = torch.Generator().manual_seed(args.seed + epoch)
        train_loader = DataLoader(
            train_dataset, batch_size=args.batch_size, shuffle=True, generator=shuffle
        )
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, criterion, device, args)
        scheduler.step()
        model.user_state = {"acc1": acc1}
        model.checkpoint()


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.6f")
    progress = ProgressMeter(len(train_loader), [batch_time, losses], f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        if epoch * len(train_loader) + i < model.iteration:  # trained on already
            continue
        images, target = images.to(device), target.to(device)
        optimizer.zero_grad()
        whole = 0.0
        parts = zip(images.chunk(args.accumulate), target.chunk(args.accumulate), strict=True)
        for part_images, part_target in parts:
            loss, _ = model.step([part_images[model.samples], part_target[model.samples]])
            whole += loss.item()
        optimizer.step()
        losses.update(whole, images.size(0))
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, device, args):
    losses = AverageMeter("Loss", ":.6f", Summary.AVERAGE)
    top1 = AverageMeter("Acc@1", ":6.2f", Summary.AVERAGE)
    progress = ProgressMeter(len(val_loader), [losses, top1], "Test: ")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    progress.display_summary()
    return top1.avg


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    """The current value and the average."""

    def __init__(self, name, fmt=":f", summary_type=Summary.NONE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)

    def summary(self):
        return ("{name} {avg" + self.fmt + "}").format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch):
        width = len(str(self.num_batches))
        entries = [f"{self.prefix}[{batch:{width}}/{self.num_batches}]"]
        print("\t".join(entries + [str(meter) for meter in self.meters]), flush=True)

    def display_summary(self):
        shown = [m.summary() for m in self.meters if m.summary_type is not Summary.NONE]
        print(" *", " ".join(shown), flush=True)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100


if __name__ == "__main__":
    main()
