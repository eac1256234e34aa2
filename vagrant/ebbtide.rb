# What Ebbtide wants of a VM and vagrant-libvirt has no option for, put into each domain before it starts: the guest
# agent's channel, and half of the memory as a virtio-mem device, so that the sum stays what it was. `require` it in a
# Vagrantfile. Nothing else of the domain is changed, and one that has them already is left alone.
require "rexml/document"

module Ebbtide
  CHANNEL = "io.ebbtide.guest.0".freeze
  # virtio-mem's device sizes are multiples of the guest's memory blocks.
  BLOCK_MIB = 128

  # MiB and vCPUs that a machine does not have at its start, and may get while it runs, by its name.
  HEADROOM_MIB = Hash.new(0)
  HEADROOM_CPUS = Hash.new(0)

  # Puts devices into the XML of a domain; returns whether it has changed.
  def self.equip(domain, headroom_mib: 0, headroom_cpus: 0)
    [channel(domain), cpus(domain, headroom_cpus), memory(domain, headroom_mib)].any?
  end

  def self.channel(domain)
    return false if domain.elements["devices/channel/target[@name='#{CHANNEL}']"]

    added = domain.elements["devices"].add_element("channel", "type" => "unix")
    added.add_element("target", "type" => "virtio", "name" => CHANNEL)
    true
  end

  # vCPUs beyond those of the start are there, off, and hot-pluggable.
  def self.cpus(domain, headroom)
    count = domain.elements["vcpu"]
    now = count.text.to_i
    return false if headroom.zero? || count.attributes["current"]

    count.attributes["current"] = now.to_s
    count.text = (now + headroom).to_s
    each = REXML::Element.new("vcpus")
    (now + headroom).times do |id|
      each.add_element("vcpu", "id" => id.to_s, "enabled" => id < now ? "yes" : "no",
                               "hotpluggable" => id.zero? ? "no" : "yes")
    end
    domain.insert_after(count, each)
    true
  end

  def self.memory(domain, headroom)
    # NUMA nodes are somebody's plan.
    return false if domain.elements["maxMemory"] || (headroom.zero? && domain.elements["cpu/numa"])

    total = domain.elements["memory"].text.to_i / 1024
    # With headroom, all that the machine begins with is its boot memory.
    device = headroom.zero? ? (total / 2 / BLOCK_MIB) * BLOCK_MIB : headroom
    boot = headroom.zero? ? total - device : total
    domain.insert_before("memory", REXML::Element.new("maxMemory"))
    %w[maxMemory memory].each do |name|
      domain.elements[name].add_attribute("unit", "MiB")
      domain.elements[name].text = (boot + device).to_s
    end
    domain.elements["maxMemory"].add_attribute("slots", "8")
    numa(domain, boot)
    added = domain.elements["devices"].add_element("memory", "model" => "virtio-mem").add_element("target")
    { "size" => device, "node" => 0, "block" => 2, "requested" => headroom.zero? ? device : 0 }.each do |name, value|
      added.add_element(name, name == "node" ? {} : { "unit" => "MiB" }).text = value.to_s
    end
    true
  end

  def self.numa(domain, boot)
    cpu = domain.elements["cpu"] || domain.add_element("cpu")
    last = domain.elements["vcpu"].text.to_i - 1
    cpu.delete_element("numa")
    cpu.add_element("numa").add_element(
      "cell", "id" => "0", "cpus" => last.zero? ? "0" : "0-#{last}", "memory" => boot.to_s, "unit" => "MiB"
    )
  end

  # Between the definition of a domain and its start.
  class Equip
    def initialize(app, _env)
      @app = app
    end

    def call(env)
      client = env[:machine].provider.driver.connection.client
      document = REXML::Document.new(client.lookup_domain_by_uuid(env[:machine].id).xml_desc(1))
      name = env[:machine].name
      if Ebbtide.equip(document.root, headroom_mib: HEADROOM_MIB[name], headroom_cpus: HEADROOM_CPUS[name])
        client.define_domain_xml(document.to_s)
      end
      @app.call(env)
    end
  end

  class Plugin < Vagrant.plugin("2")
    name "ebbtide"

    action_hook(:ebbtide, :machine_action_up) do |hook|
      hook.before(VagrantPlugins::ProviderLibvirt::Action::StartDomain, Equip)
    end
    action_hook(:ebbtide, :machine_action_reload) do |hook|
      hook.before(VagrantPlugins::ProviderLibvirt::Action::StartDomain, Equip)
    end
  end
end
